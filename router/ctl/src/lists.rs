//! Lists and single resources: how `ctl` reads and prints them.

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use vocabulary::{SessionId, TimeSpan, flags};

use super::client::OperatorClient;
use super::error::CtlError;
use super::filters::ListFilter;
use super::output::{OutputFormat, note};
use super::table::{TableColumns, aligned, cell_text, lines, row, table};

const MAX_PAGE: u16 = 1_000;

// Which part of a list.
#[derive(Clone, Debug, Args)]
pub(crate) struct PageArgs {
    /// Maximum number of lines.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_PAGE)))]
    limit: u16,
    /// Continues an earlier list after its end.
    #[arg(long)]
    cursor: Option<String>,
    /// The whole list, page after page.
    #[arg(long, conflicts_with = "cursor")]
    all: bool,
    #[command(flatten)]
    consistency: ConsistencyArgs,
}

// How fresh a read must be. Not a doc comment: as one it would be the help of the command.
#[derive(Clone, Debug, Args)]
pub(crate) struct ConsistencyArgs {
    /// How fresh the answer must be.
    #[arg(long, value_enum, default_value_t)]
    consistency: ConsistencyArg,
    /// With bounded: how old the answer may be, as 500ms or 2s.
    #[arg(long, value_name = "DURATION", required_if_eq("consistency", "bounded"), value_parser = flags::duration)]
    max_staleness: Option<TimeSpan>,
}

impl ConsistencyArgs {
    fn query_pairs(&self) -> Result<Vec<(&'static str, String)>, CtlError> {
        let word = match (self.consistency, self.max_staleness) {
            (ConsistencyArg::Local, None) => return Ok(Vec::new()),
            (ConsistencyArg::Linearizable, None) => "linearizable",
            (ConsistencyArg::Bounded, _) => "bounded",
            (_, Some(_)) => return Err(CtlError::Usage("--max-staleness: only with --consistency bounded".into())),
        };
        let millis = self.max_staleness.map(|most| ("max_staleness", most.to_string()));
        Ok([("consistency", word.to_owned())].into_iter().chain(millis).collect())
    }
}

/// How fresh a read must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum ConsistencyArg {
    /// What the node last applied.
    #[default]
    Local,
    /// No older than --max-staleness.
    Bounded,
    /// Everything that was acknowledged before.
    Linearizable,
}

#[derive(Debug)]
pub(crate) struct ListSpec {
    /// Path of the list, and name of its array in the response.
    pub(crate) name: &'static str,
    pub(crate) columns: TableColumns,
}

pub(crate) const OWNERS: ListSpec = ListSpec {
    name: "owners",
    columns: "PREFIX /prefix, BLOCKS /blocks, STATE /state, OWNER /owner/endpoint, RANK /owner/rank, \
        EPOCH /epoch, REPLICAS /replicas, TENANT /tenant, MODEL /model",
};
pub(crate) const LEASES: ListSpec = ListSpec {
    name: "leases",
    columns: "WORKER /worker, ENDPOINT /endpoint, ROLE /role, STATE /state, EXPIRES IN /expires_in, EPOCH /epoch, \
        INCARNATION /incarnation, DRAINING /draining",
};
pub(crate) const SESSIONS: ListSpec = ListSpec {
    name: "sessions",
    columns: "SESSION /id, OWNER /owner/endpoint, LIVE /owner/live, EPOCH /epoch, HEADS /heads, PARENT /parent, \
        IN FLIGHT /in_flight_steps, IDLE /idle, TENANT /tenant, MODEL /model",
};
pub(crate) const ARTIFACTS: ListSpec = ListSpec {
    name: "artifacts",
    columns: "ARTIFACT /id, BLOCKS /prefix_blocks, STATE /state, OWNER /owner/endpoint, EPOCH /epoch, \
        REPLICAS /replicas, SESSIONS /sessions, CHILDREN /children, PINNED /pinned, GROUP /group, \
        BYTES /bytes",
};
pub(crate) const REPLICAS: ListSpec = ListSpec {
    name: "replicas",
    columns: "ARTIFACT /artifact, WORKER /worker/endpoint, LIVE /worker/live, BLOCKS /prefix_blocks, EXPIRES IN /expires_in",
};
pub(crate) const INTENTS: ListSpec = ListSpec {
    name: "intents",
    columns: "SESSION /session, WORKER /target/endpoint, ROUTER /router_node, BASE /base_prefix, EXPIRES IN /expires_in",
};
pub(crate) const GROUPS: ListSpec =
    ListSpec { name: "groups", columns: "GROUP /id, ARTIFACTS /artifacts, BYTES /bytes" };
pub(crate) const TENANTS: ListSpec = ListSpec {
    name: "tenants",
    columns: "TENANT /tenant, QUOTA /max_entries, ARTIFACTS /artifacts, SESSIONS /sessions",
};
pub(crate) const WORKERS: ListSpec = ListSpec {
    name: "workers",
    columns: "WORKER /id, ENDPOINT /endpoint, SOURCE /source, ROLE /role, HEALTH /health, KV INDEX /kv_index_state, \
        EVENT SOURCES /kv_event_sources/configured, EVENTS CONNECTED /kv_event_sources/connected, LEASE /lease/state, \
        RUNNING /load/running, WAITING /load/waiting, MODELS /models, REASON /kv_index_reason",
};

/// A worker that answers probes but is ejected as an outlier must not be shown as simply ready.
fn mark_ejected(line: &mut Value) {
    if line["ejection"].is_object() {
        line["health"] = json!(format!("{}, ejected", cell_text(line.get("health"))));
    }
}

impl ListSpec {
    pub(crate) async fn show(
        &self,
        client: &OperatorClient,
        (filter, page): (&impl ListFilter, &PageArgs),
        output: OutputFormat,
    ) -> Result<(), CtlError> {
        let mut query = filter.query_pairs();
        query.push(("limit", page.limit.to_string()));
        query.extend(page.consistency.query_pairs()?);
        let most = if page.all { usize::MAX } else { 1 };
        let mut answer = fetch_pages(client, (self.name, &query), (page.cursor.clone(), most)).await?;
        if output == OutputFormat::Table {
            answer[self.name].as_array_mut().into_iter().flatten().for_each(mark_ejected);
        }
        output.print(&answer, || table(self.columns, lines(&answer[self.name])));
        if let (OutputFormat::Table, Some(cursor)) = (output, answer["next_cursor"].as_str()) {
            note(&format!("the list is longer: show all of it with --all, or the next page with --cursor {cursor}"));
        }
        Ok(())
    }
}

/// Fetches pages of a list after `cursor` and joins them into one response. After an error the earlier pages are
/// lost.
async fn fetch_pages(
    client: &OperatorClient,
    (name, query): (&str, &[(&str, String)]),
    (mut cursor, most): (Option<String>, usize),
) -> Result<Value, CtlError> {
    let mut lines = Vec::new();
    for page in 1.. {
        let page_query: Vec<_> = query.iter().cloned().chain(cursor.map(|cursor| ("cursor", cursor))).collect();
        let mut answer = client.get(&with_query(name, &page_query)).await?.json;
        lines.extend(answer[name].as_array_mut().map(std::mem::take).unwrap_or_default());
        cursor = answer["next_cursor"].as_str().map(str::to_owned);
        if cursor.is_none() || page == most {
            answer[name] = json!(lines);
            return Ok(answer);
        }
    }
    unreachable!("pages are counted without end")
}

pub(super) async fn fetch_all(
    client: &OperatorClient,
    (name, filter): (&str, &[(&str, String)]),
) -> Result<Vec<Value>, CtlError> {
    let query = [filter, &[("limit", MAX_PAGE.to_string())]].concat();
    let answer = fetch_pages(client, (name, &query), (None, usize::MAX)).await?;
    Ok(lines(&answer[name]).to_vec())
}

/// Prints one resource by its path: as JSON, or field by field.
pub(crate) async fn show_one(
    client: &OperatorClient,
    (path, consistency): (&str, &ConsistencyArgs),
    (name, output): (&str, OutputFormat),
) -> Result<(), CtlError> {
    let response = client.get(&with_query(path, &consistency.query_pairs()?)).await?;
    output.print(&response.json, || {
        let mut rows = Vec::new();
        fields("", &response.json[name], &mut rows);
        rows.extend(response.tag.map(|tag| vec!["etag".to_owned(), tag]));
        aligned(rows)
    });
    Ok(())
}

pub(crate) fn fields(path: &str, value: &Value, rows: &mut Vec<Vec<String>>) {
    let below = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    match value {
        Value::Object(inner) if !value["generation"].is_u64() || inner.len() != 3 => {
            inner.iter().for_each(|(name, value)| fields(&below(name), value, rows));
        }
        Value::Array(all) if !all.is_empty() && !all.iter().all(Value::is_string) => {
            all.iter().enumerate().for_each(|(n, value)| fields(&below(&n.to_string()), value, rows));
        }
        plain => rows.push(vec![path.to_owned(), cell_text(Some(plain))]),
    }
}

pub(crate) async fn show_tree(
    client: &OperatorClient,
    session: SessionId,
    output: OutputFormat,
) -> Result<(), CtlError> {
    let response = client.get(&format!("sessions/{session}/tree")).await?;
    let branch = |branch: &Value| {
        let depth = branch["depth"].as_u64().unwrap_or_default().min(40) as usize;
        let twig = if depth == 0 { String::new() } else { format!("{}`- ", "   ".repeat(depth - 1)) };
        let here = if branch["id"].as_str() == Some(&session.to_string()) { " *" } else { "" };
        vec![
            format!("{twig}{}{here}", cell_text(branch.get("id"))),
            cell_text(branch.pointer("/owner/endpoint")),
            cell_text(branch.get("blocks")),
            cell_text(branch.get("heads")),
        ]
    };
    let title = row(["SESSION", "OWNER", "BLOCKS", "HEADS"]);
    output.print(&response.json, || {
        aligned(std::iter::once(title).chain(lines(&response.json["branches"]).iter().map(branch)))
    });
    if output == OutputFormat::Table && response.json["truncated"] == true {
        note("the tree has more sessions than are shown");
    }
    Ok(())
}

/// Builds `path?name=value&...`; values are percent-encoded where necessary.
pub(crate) fn with_query(path: &str, pairs: &[(&str, String)]) -> String {
    let joined: Vec<String> = pairs.iter().map(|(name, value)| format!("{name}={}", escaped(value))).collect();
    if joined.is_empty() { path.to_owned() } else { format!("{path}?{}", joined.join("&")) }
}

/// Percent-encodes a text for a path or a query.
pub(crate) fn escaped(text: &str) -> String {
    let byte = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(byte).collect()
}
