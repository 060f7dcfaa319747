//! Markdown as mdBook reads it: headings, paragraphs, tables.

/// Sentence below the heading of every page.
const GENERATED: &str = "This page is generated from the code by `just reference`; a test compares both.";

/// A page that is being written.
#[derive(Debug)]
pub(super) struct MarkdownPage {
    text: String,
}

impl MarkdownPage {
    pub(super) fn new(title: &str) -> Self {
        Self { text: format!("# {title}\n\n{GENERATED}\n") }
    }

    /// Adds a heading; a level of 1 is the page's title.
    pub(super) fn heading(&mut self, level: usize, text: &str) {
        self.text.push_str(&format!("\n{} {text}\n", "#".repeat(level)));
    }

    /// Adds a paragraph of Markdown. An empty one adds nothing.
    pub(super) fn paragraph(&mut self, markdown: &str) {
        let markdown = markdown.trim();
        if !markdown.is_empty() {
            self.text.push_str(&format!("\n{markdown}\n"));
        }
    }

    /// Adds text that is printed as it is.
    pub(super) fn preformatted(&mut self, text: &str) {
        let lines: Vec<&str> = text.trim_matches('\n').lines().map(str::trim_end).collect();
        self.text.push_str(&format!("\n```text\n{}\n```\n", lines.join("\n")));
    }

    /// Adds a table whose cells are Markdown. Without rows it adds nothing; a column without any text is left out.
    pub(super) fn table<const N: usize>(&mut self, columns: [&str; N], rows: &[[String; N]]) {
        if rows.is_empty() {
            return;
        }
        let shown: Vec<usize> = (0..N).filter(|column| rows.iter().any(|row| !row[*column].is_empty())).collect();
        let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
        self.text.push('\n');
        self.text.push_str(&line(shown.iter().map(|column| columns[*column].to_owned()).collect()));
        self.text.push_str(&format!("|{}\n", "---|".repeat(shown.len())));
        for row in rows {
            self.text.push_str(&line(shown.iter().map(|column| cell(&row[*column])).collect()));
        }
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }
}

/// A cell ends with its line and at a bar, also within code.
fn cell(markdown: &str) -> String {
    markdown.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Returns `text` as code. Code that is empty could not be seen.
pub(super) fn code(text: &str) -> String {
    match text {
        "" => "empty".to_owned(),
        text if text.contains('`') => format!("`` {text} ``"),
        text => format!("`{text}`"),
    }
}

/// Returns words as code with commas between them.
pub(super) fn code_list<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().map(code).collect::<Vec<_>>().join(", ")
}

/// Returns plain text that may hold code in backticks as Markdown: what would be markup is escaped.
pub(super) fn prose(text: &str) -> String {
    let mut markdown = String::with_capacity(text.len());
    for (index, part) in text.split('`').enumerate() {
        let is_code = index % 2 == 1;
        if index > 0 {
            markdown.push('`');
        }
        for character in part.chars() {
            if !is_code && matches!(character, '<' | '>' | '*' | '[' | ']') {
                markdown.push('\\');
            }
            markdown.push(character);
        }
    }
    markdown
}

/// Returns `text` with a full stop at its end, unless it ends as a sentence. Empty text stays empty.
pub(super) fn sentence(text: &str) -> String {
    let text = text.trim();
    if text.is_empty() || text.ends_with(['.', '!', '?', ':']) { text.to_owned() } else { format!("{text}.") }
}

/// Returns `text` with an upper-case letter at its beginning. A word in front of a colon may be a value and stays.
pub(super) fn capitalized(text: &str) -> String {
    if text.split_whitespace().next().is_some_and(|word| word.ends_with(':')) {
        return text.to_owned();
    }
    let mut characters = text.chars();
    characters.next().map(|first| first.to_uppercase().chain(characters).collect()).unwrap_or_default()
}

/// Joins sentences; empty ones are left out.
pub(super) fn joined(sentences: &[String]) -> String {
    let shown: Vec<&str> = sentences.iter().map(String::as_str).filter(|sentence| !sentence.is_empty()).collect();
    shown.join(" ")
}
