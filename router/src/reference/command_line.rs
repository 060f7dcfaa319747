//! Page of all commands, from the definition of the command line.

use clap::{Arg, ArgAction, Command};

use super::markdown::{MarkdownPage, capitalized, code, code_list, joined, prose, sentence};

/// Returns the page. Hidden commands and options are left out.
pub(super) fn page(mut command: Command) -> String {
    command.build();
    let mut page = MarkdownPage::new("Command line");
    page.paragraph(
        "Every command prints the same with `--help`. Options that a command has for its subcommands, too, are \
                    listed once, at that command.",
    );
    let mut list = Vec::new();
    collect(&command, &mut list);
    let link = |name: &str| format!("[{name}](#{})", name.to_lowercase().replace(' ', "-"));
    let rows = list.iter().map(|it| [link(full_name(it)), about(it)]);
    page.table(["command", "what it does"], &rows.collect::<Vec<_>>());
    add_command(&mut page, &command, &[]);
    page.into_text()
}

/// Adds a command and all below it, parents first.
fn collect<'c>(command: &'c Command, list: &mut Vec<&'c Command>) {
    list.push(command);
    visible_subcommands(command).for_each(|below| collect(below, list));
}

fn visible_subcommands(command: &Command) -> impl Iterator<Item = &Command> {
    // clap adds `help` beside any subcommand.
    command.get_subcommands().filter(|below| !below.is_hide_set() && below.get_name() != "help")
}

fn full_name(command: &Command) -> &str {
    command.get_bin_name().unwrap_or_else(|| command.get_name())
}

fn about(command: &Command) -> String {
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    sentence(&prose(&about))
}

fn add_command(page: &mut MarkdownPage, command: &Command, inherited: &[&str]) {
    page.heading(2, full_name(command));
    let long = command.get_long_about().or(command.get_about()).map(ToString::to_string).unwrap_or_default();
    page.paragraph(&sentence(&prose(&long)));
    let usage = command.clone().render_usage().to_string();
    page.preformatted(usage.trim_start_matches("Usage: "));
    let is_shown = |argument: &&Arg| {
        let is_added = matches!(
            argument.get_action(),
            ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
        );
        !is_added && !argument.is_hide_set() && !inherited.contains(&argument.get_id().as_str())
    };
    let arguments: Vec<&Arg> = command.get_arguments().filter(is_shown).collect();
    let rows: Vec<[String; 4]> = arguments.iter().copied().map(argument_row).collect();
    page.table(["argument", "default", "environment", "description"], &rows);
    if let Some(after) = command.get_after_long_help().or(command.get_after_help()) {
        page.preformatted(&after.to_string());
    }
    let global =
        arguments.iter().filter(|argument| argument.is_global_set()).map(|argument| argument.get_id().as_str());
    let inherited: Vec<&str> = inherited.iter().copied().chain(global).collect();
    visible_subcommands(command).for_each(|below| add_command(page, below, &inherited));
}

fn argument_row(argument: &Arg) -> [String; 4] {
    let help = argument.get_long_help().or(argument.get_help()).map(ToString::to_string).unwrap_or_default();
    let takes_value = argument.get_action().takes_values();
    let values = argument.get_possible_values();
    let words = values.iter().filter(|value| !value.is_hide_set()).map(|value| value.get_name());
    let accepted =
        if takes_value && !values.is_empty() { format!("One of {}.", code_list(words)) } else { String::new() };
    let defaults = argument.get_default_values().iter().map(|value| value.to_string_lossy().into_owned());
    let default = if takes_value { defaults.collect::<Vec<_>>().join(",") } else { String::new() };
    let variable = argument.get_env().map(|name| code(&name.to_string_lossy())).unwrap_or_default();
    [
        code(&invocation(argument)),
        if default.is_empty() { String::new() } else { code(&default) },
        variable,
        joined(&[sentence(&capitalized(&prose(&help))), accepted]),
    ]
}

/// Returns how an argument is written, for example `-o, --output <OUTPUT>`.
fn invocation(argument: &Arg) -> String {
    let names = argument.get_value_names().unwrap_or_default();
    let repeated = if matches!(argument.get_num_args(), Some(range) if range.max_values() > 1) { "..." } else { "" };
    let value = |name: &str| format!("<{name}>{repeated}");
    let values: Vec<String> = match names {
        [] if argument.get_action().takes_values() => vec![value(&argument.get_id().as_str().to_uppercase())],
        names => names.iter().map(|name| value(name)).collect(),
    };
    let short = argument.get_short().map(|short| format!("-{short}"));
    let long = argument.get_long().map(|long| format!("--{long}"));
    let flags: Vec<String> = short.into_iter().chain(long).collect();
    match (flags.is_empty(), argument.get_action().takes_values()) {
        (true, _) => values.join(" "),
        (false, true) => format!("{} {}", flags.join(", "), values.join(" ")),
        (false, false) => flags.join(", "),
    }
}
