//! Output of `ctl`.

use std::process::ExitCode;

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::json;

/// A bar on standard error, cleared when it is dropped.
pub fn bar(template: &str, length: usize) -> ProgressBar {
    let style = ProgressStyle::with_template(template).expect("templates are fixed and valid").progress_chars("#..");
    ProgressBar::new(length as u64).with_style(style)
}

/// How answers are printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub enum OutputFormat {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

impl OutputFormat {
    /// Reports a failed command: its exit code, its error code, the API's reason, and advice.
    pub(super) fn fail(self, (code, word): (u8, &str), reason: Option<&str>, detail: &str) -> ExitCode {
        let error = || json!({"word": word, "reason": reason, "detail": detail, "exit_code": code});
        match self {
            Self::Table => note(&format!("ownerserve: {detail}")),
            Self::Json => note(&json!({"error": error()}).to_string()),
        }
        ExitCode::from(code)
    }

    /// Prints a note next to the answer.
    pub(super) fn note(self, text: &str) {
        match self {
            Self::Table => note(text),
            Self::Json => note(&json!({"note": text}).to_string()),
        }
    }

    /// Prints an answer: as JSON, or as this text.
    pub(crate) fn print(self, answer: &impl Serialize, text: impl FnOnce() -> String) {
        match self {
            Self::Json => print_text(&pretty(answer)),
            Self::Table => print_text(&text()),
        }
    }
}

/// Whether a stream supports colors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ColorSupport {
    /// A terminal.
    Ansi,
    /// A file or a pipe, or any stream if `NO_COLOR` is set.
    None,
}

impl ColorSupport {
    pub(super) fn of_stdout() -> Self {
        use std::io::IsTerminal as _;
        let is_wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        if is_wanted && std::io::stdout().is_terminal() { Self::Ansi } else { Self::None }
    }

    /// Formats a line in red.
    pub(super) fn red(self, line: &str) -> String {
        match self {
            Self::Ansi => format!("\u{1b}[31m{}\u{1b}[0m\n", line.trim_end()),
            Self::None => line.to_owned(),
        }
    }
}

/// Formats an answer as JSON for programs.
pub fn pretty(answer: &impl Serialize) -> String {
    serde_json::to_string_pretty(answer).expect("plain numbers and words encode") + "\n"
}

/// Prints an answer. A closed pipe (as by `head`) is not an error.
pub(super) fn print_text(text: &str) {
    let _ = write_stdout(text);
}

/// Prints a part of an endless answer.
pub(super) fn write_stdout(text: &str) -> std::io::Result<()> {
    use std::io::Write as _;
    std::io::stdout().write_all(text.as_bytes())
}

/// Prints a note to stderr.
pub(super) fn note(text: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr(), "{text}");
}
