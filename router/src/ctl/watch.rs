//! `ownerserve ctl watch`: changes as they happen, until it is ended.

use clap::Args;
use futures::StreamExt as _;
use http::Method;
use http_body_util::BodyExt as _;
use serde_json::Value;

use super::client::{Client, CtlError};
use super::lists::with_query;
use super::table::word;
use super::{Output, say};

/// Longest event.
const LONGEST: usize = 16 << 20;

/// What is watched.
#[derive(Clone, Debug, Args)]
pub(crate) struct WatchArgs {
    /// The first revision that is told; what comes from now on when left out.
    #[arg(long)]
    from: Option<u64>,
    /// Only these kinds of records: worker, session, artifact, node, quota.
    #[arg(long, value_delimiter = ',')]
    kind: Vec<String>,
    /// Ends after so many revisions.
    #[arg(long)]
    count: Option<u64>,
}

/// Prints changes. A connection that breaks is taken up again behind what was printed, at the next endpoint if need be.
pub(crate) async fn watch(client: &Client, args: &WatchArgs, output: Output) -> Result<(), CtlError> {
    let (mut from, mut left) = (args.from, args.count.unwrap_or(u64::MAX));
    while left > 0 {
        let mut query: Vec<_> = from.map(|from| ("from", from.to_string())).into_iter().collect();
        query.extend((!args.kind.is_empty()).then(|| ("kind", args.kind.join(","))));
        let (endpoint, answer) = client.open(Method::GET, &with_query("watch", &query), (None, None)).await?;
        let mut pieces = answer.into_body().into_data_stream();
        let mut text = Vec::new();
        while let Some(Ok(piece)) = pieces.next().await {
            text.extend_from_slice(&piece);
            while let Some(event) = take_event(&mut text) {
                let Some((name, data)) = event else { continue };
                if name == "compacted" {
                    return Err(compacted(&data));
                }
                print(&data, output);
                from = data["revision"].as_u64().map(|revision| revision + 1).or(from);
                left -= 1;
                if left == 0 {
                    return Ok(());
                }
            }
            if text.len() > LONGEST {
                return Err(CtlError::NotOurs { endpoint, detail: "an event without end".into() });
            }
        }
    }
    Ok(())
}

fn compacted(data: &Value) -> CtlError {
    let detail = word(data.get("detail"));
    CtlError::Problem { title: "Revision compacted".into(), word: "compacted".into(), detail }
}

/// Takes the next whole event from the start of `text`: its name and data; none inside for a comment.
fn take_event(text: &mut Vec<u8>) -> Option<Option<(String, Value)>> {
    let end = text.windows(2).position(|pair| pair == b"\n\n")?;
    let event: Vec<u8> = text.drain(..end + 2).collect();
    let event = String::from_utf8_lossy(&event).into_owned();
    let field =
        |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned());
    let data = field("data:").and_then(|data| serde_json::from_str(&data).ok());
    Some(field("event:").zip(data))
}

fn print(data: &Value, output: Output) {
    if output == Output::Json {
        return say(&format!("{data}\n"));
    }
    for change in data["changes"].as_array().into_iter().flatten() {
        let cell = |name: &str| word(change.get(name));
        say(&format!("{}  {:4}  {:8}  {}\n", data["revision"], cell("op"), cell("kind"), cell("key")));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_are_taken_whole_and_comments_skipped() {
        let mut text = b": still here\n\nid: 7\nevent: changes\ndata: {\"revision\":7}\n\nid: 8\nevent: cha".to_vec();
        assert_eq!(take_event(&mut text), Some(None));
        assert_eq!(take_event(&mut text), Some(Some(("changes".into(), json!({"revision": 7})))));
        assert_eq!(take_event(&mut text), None);
        assert_eq!(text, b"id: 8\nevent: cha");
    }
}
