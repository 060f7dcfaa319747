//! Decisions and routing mode: both belong to one router, not to the cluster.

use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, ValueEnum};
use serde::Serialize;
use serde_json::{Map, Value, json};
use vocabulary::RequestId;

use super::client::OperatorClient;
use super::endpoints::{print_responses, print_write_results, query_all, write_all};
use super::error::CtlError;
use super::filters::{DecisionFilterArgs, ListFilter as _};
use super::lists::{fields, with_query};
use super::output::OutputFormat;
use super::table::{ColumnSpec, aligned, lines, table};
use super::writes::put;
use crate::config::units::TimeSpan;

/// Which decisions are shown.
#[derive(Clone, Debug, Args)]
pub(crate) struct DecisionArgs {
    /// Only this one, by the id that its client saw in x-request-id.
    request: Option<RequestId>,
    #[command(flatten)]
    filter: DecisionFilterArgs,
    /// That arrived within this time, as 15m.
    #[arg(long, value_name = "SPAN")]
    since: Option<TimeSpan>,
    /// Whose first token took longer, as 500ms; where there was none, as of an answer that was not streamed, all of it.
    #[arg(long, value_name = "SPAN")]
    slower_than: Option<TimeSpan>,
    /// Most lines.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
}

const DECISION_COLUMNS: ColumnSpec = "REQUEST /request, SESSION /known/session, STEP /decision/step, MODE /mode, ACTION /last/action, \
        WORKER /last/decode, PROMPT /known/prompt, CACHED /seen/cached, PREDICTED US /seen/predicted, \
        FIRST TOKEN US /seen/first_token, TOTAL US /seen/total";

/// Prints the newest decisions, or one of them in full.
pub(crate) async fn decisions(
    client: &OperatorClient,
    args: &DecisionArgs,
    output: OutputFormat,
) -> Result<(), CtlError> {
    if let Some(request) = &args.request {
        let got = client.get(&format!("decisions/{request}")).await?;
        let mut rows = Vec::new();
        fields("", &got.json, &mut rows);
        output.print(&got.json, || aligned(rows));
        return Ok(());
    }
    let mut query = vec![("limit", args.limit.to_string())];
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    query.extend(args.filter.query_pairs());
    query.extend(args.since.map(|span| ("since", now.saturating_sub(span.0).as_millis().to_string())));
    query.extend(args.slower_than.map(|span| ("slower_than_us", span.0.as_micros().to_string())));
    let got = client.get(&with_query("decisions", &query)).await?;
    output.print(&got.json, || {
        let mut shown = lines(&got.json["decisions"]).to_vec();
        for line in &mut shown {
            line["last"] = lines(&line["attempts"]).last().cloned().unwrap_or_default();
        }
        table(DECISION_COLUMNS, &shown)
    });
    if output == OutputFormat::Table && got.json["complete"] == false {
        output.note("the search ended before all that is on disk was looked through; --since makes it shorter");
    }
    Ok(())
}

/// Who decides.
#[derive(Clone, Copy, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
enum ModeArg {
    /// The planner.
    Own,
    /// The bypass; plans are made and recorded.
    Shadow,
    /// The bypass; nothing is planned.
    Sticky,
}

/// What the dial is set to.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModeArgs {
    /// Who decides from now on; unchanged when left out.
    mode: Option<ModeArg>,
    /// In mode own, the percentage of sessions that the planner routes.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    rollout: Option<u8>,
    /// Exactly the actions that are switched off from now on, with commas; `none` switches all on again.
    #[arg(long, value_name = "ACTION", value_delimiter = ',')]
    disabled: Option<Vec<ActionArg>>,
}

/// What can be switched off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
enum ActionArg {
    /// Nothing.
    None,
    DecodeContinuation,
    RemotePrefill,
    ArtifactFetch,
    TailRecompute,
    StateMigration,
}

/// Converts the actions to the API's JSON.
fn disabled_actions(disabled: &[ActionArg]) -> Result<Value, CtlError> {
    if disabled.len() > 1 && disabled.contains(&ActionArg::None) {
        return Err(CtlError::Usage("--disabled: none stands alone; leave it out, or the actions beside it".into()));
    }
    Ok(disabled.iter().filter(|switch| **switch != ActionArg::None).map(|switch| json!(switch)).collect())
}

const MODE_COLUMNS: ColumnSpec = "ENDPOINT /endpoint, MODE /answer/mode, ROLLOUT PERCENT /answer/rollout_percent, \
        SWITCHED OFF /answer/disabled";

/// Shows every endpoint's routing mode, or sets it.
pub(crate) async fn mode(client: &OperatorClient, args: &ModeArgs, output: OutputFormat) -> Result<(), CtlError> {
    let mode = args.mode.map(|mode| json!(mode));
    if let (Some(ModeArg::Sticky), Some(_)) = (args.mode, args.rollout) {
        let what =
            "--rollout: in mode sticky nothing is planned for any session, so that a share has no effect; leave it out";
        return Err(CtlError::Usage(what.into()));
    }
    let disabled = args.disabled.as_deref().map(disabled_actions).transpose()?;
    let wanted = [("mode", mode), ("rollout_percent", args.rollout.map(Value::from)), ("disabled", disabled)];
    let wanted: Map<_, _> = wanted.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
    if wanted.is_empty() {
        return print_responses(&query_all(client, "mode").await, MODE_COLUMNS, output);
    }
    print_write_results(&write_all(client, put("mode", Value::Object(wanted))).await, MODE_COLUMNS, output)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct DecisionCommandLine {
        #[command(flatten)]
        args: DecisionArgs,
    }

    #[test]
    fn decisions_filter_accepts_every_routing_mode() {
        for mode in ["own", "shadow", "sticky"] {
            let line = DecisionCommandLine::try_parse_from(["decisions", "--mode", mode]).unwrap();
            assert_eq!(line.args.filter.query_pairs(), [("mode", mode.to_owned())]);
            serde_json::from_value::<crate::pipeline::routing::RoutingMode>(json!(mode)).unwrap();
        }
        let refused = DecisionCommandLine::try_parse_from(["decisions", "--mode", "fast"]).unwrap_err().to_string();
        assert!(refused.contains("[possible values: own, shadow, sticky]"), "{refused}");
    }

    #[test]
    fn action_names_match_the_api_and_none_is_an_empty_list() {
        let words: Vec<_> =
            ActionArg::value_variants().iter().filter_map(|switch| switch.to_possible_value()).collect();
        let names: Vec<_> = words.iter().map(|word| word.get_name()).collect();
        let actions: Vec<_> = planner::Action::ALL[1..].iter().map(|action| action.as_str()).collect();
        assert_eq!((names[0], &names[1..]), ("none", &actions[..]));
        assert_eq!(disabled_actions(&[ActionArg::None]).unwrap(), json!([]));
        let both = [ActionArg::ArtifactFetch, ActionArg::StateMigration];
        assert_eq!(disabled_actions(&both).unwrap(), json!(["artifact_fetch", "state_migration"]));
        assert!(
            disabled_actions(&[ActionArg::None, ActionArg::ArtifactFetch])
                .unwrap_err()
                .to_string()
                .contains("stands alone")
        );
    }
}
