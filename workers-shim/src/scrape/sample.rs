//! One line of Prometheus text: `name{label="value",...} number [timestamp]`. It judges no name.

/// Labels that are read; vLLM's longest line has 40.
const MAX_LABELS: usize = 128;

/// One sample. Label values keep their escapes: the ones that are read here have none.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample<'a> {
    /// The family's, or that of a part of a histogram.
    pub name: &'a str,
    labels: &'a str,
    /// The number.
    pub value: f64,
}

impl<'a> Sample<'a> {
    /// Reads a line; none when it is not a sample.
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

    /// The value of the label `wanted`.
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

/// Where the brace closes that opened before `text`: braces inside quotes do not count.
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

/// Where the quote closes that opened before `text`.
fn closing_quote(text: &str) -> Option<usize> {
    let mut escaped = false;
    text.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}
