//! Parses one line of Prometheus text, `name{label="value",...} number [timestamp]`, for any metric name.

/// Maximum number of labels; vLLM's longest line has 40.
const MAX_LABELS: usize = 128;

/// One sample. Escapes in label values are kept: the values that are read here contain none.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample<'a> {
    /// The metric name, including suffixes of histograms.
    pub name: &'a str,
    labels: &'a str,
    /// The value.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// Parses a line; None if it is not a sample.
    pub fn read(line: &'a str) -> Option<Self> {
        let end = line.find(['{', ' ', '\t'])?;
        let (name, rest) = line.split_at(end);
        if name.is_empty() {
            return None;
        }
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(inside) => {
                let close = closing_brace(inside)?;
                (&inside[..close], &inside[close + 1..])
            }
            None => ("", rest),
        };
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        Some(Self { name, labels, value })
    }

    /// Returns the value of the label `wanted`.
    pub fn label(&self, wanted: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        for _ in 0..MAX_LABELS {
            let (name, after) = rest.split_once("=\"")?;
            let end = closing_quote(after)?;
            if name.trim_start_matches([',', ' ']).trim_end() == wanted {
                return Some(&after[..end]);
            }
            rest = &after[end + 1..];
        }
        None
    }
}

/// Returns the offset of the closing brace, ignoring braces inside quotes. `text` starts after the opening one.
fn closing_brace(text: &str) -> Option<usize> {
    let mut at = 0;
    loop {
        let next = at + text.get(at..)?.find(['"', '}'])?;
        if text.as_bytes()[next] == b'}' {
            return Some(next);
        }
        at = next + 1;
        at += closing_quote(text.get(at..)?)? + 1;
    }
}

/// Returns the offset of the closing quote. `text` starts after the opening one.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}
