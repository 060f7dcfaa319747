//! Decisions and routing settings: both belong to one router, not to the cluster.

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use serde_json::{Map, Value, json};
use vocabulary::{RequestId, TimeSpan, UtcTime, flags};

use super::args::ModeArg;
use super::client::OperatorClient;
use super::endpoints::{print_responses, print_write_results, query_all, write_all};
use super::error::CtlError;
use super::explain;
use super::filters::{DecisionFilterArgs, ListFilter as _};
use super::lists::{fields, with_query};
use super::output::OutputFormat;
use super::table::{TableColumns, aligned, lines, table};
use super::writes::put;

/// Decisions of the router at the first endpoint: why steps were served as they were.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum DecisionCommand {
    /// Lists decisions, newest first.
    List(Box<DecisionListArgs>),
    /// Shows one decision, field by field.
    Get(RequestOperand),
    /// Explains one decision: what was known, every candidate with its cost, the choice and the outcome.
    Explain(RequestOperand),
}

#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct RequestOperand {
    /// The request, by the id that its client saw in x-request-id.
    request: RequestId,
}

// Which decisions are shown. Not a doc comment: as one it would be the help of the command.
#[derive(Clone, Debug, Args)]
pub(crate) struct DecisionListArgs {
    #[command(flatten)]
    filter: DecisionFilterArgs,
    /// Received within this time, as 15m.
    #[arg(long, value_name = "DURATION", value_parser = flags::duration)]
    since: Option<TimeSpan>,
    /// With a longer time to first token, as 500ms; for a response that was not streamed, with a longer duration.
    #[arg(long, value_name = "DURATION", value_parser = flags::duration)]
    slower_than: Option<TimeSpan>,
    /// Maximum number of lines.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=1000))]
    limit: u16,
}

const DECISION_COLUMNS: TableColumns = "REQUEST /request_id, SESSION /lookup/session_id, STEP KIND /decision/step_kind, \
        MODE /mode, ACTION /last/action, WORKER /worker, PROMPT /lookup/prompt_tokens, CACHED /observed/cached_tokens, \
        PREDICTED TTFT /observed/predicted_ttft, TTFT /observed/ttft, DURATION /observed/duration";

impl DecisionCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        match self {
            Self::List(args) => list_decisions(client, args, output).await,
            Self::Get(RequestOperand { request }) => show_decision(client, *request, output).await,
            Self::Explain(RequestOperand { request }) => explain::explain(client, *request, output).await,
        }
    }
}

/// Prints one decision in full.
async fn show_decision(client: &OperatorClient, request: RequestId, output: OutputFormat) -> Result<(), CtlError> {
    let response = client.get(&format!("decisions/{request}")).await?;
    let mut rows = Vec::new();
    fields("", &response.json, &mut rows);
    output.print(&response.json, || aligned(rows));
    Ok(())
}

/// Prints the newest decisions.
async fn list_decisions(
    client: &OperatorClient,
    args: &DecisionListArgs,
    output: OutputFormat,
) -> Result<(), CtlError> {
    let mut query = vec![("limit", args.limit.to_string())];
    query.extend(args.filter.query_pairs());
    query.extend(args.since.map(|span| ("since", UtcTime::from_unix_ms(super::unix_ms()).before(span.0).to_string())));
    query.extend(args.slower_than.map(|span| ("slower_than", span.to_string())));
    let response = client.get(&with_query("decisions", &query)).await?;
    output.print(&response.json, || {
        let mut shown = lines(&response.json["decisions"]).to_vec();
        for line in &mut shown {
            let last = lines(&line["attempts"]).last().cloned().unwrap_or_default();
            line["worker"] = lines(&last["legs"]).last().map(|leg| leg["worker"].clone()).unwrap_or_default();
            line["last"] = last;
        }
        table(DECISION_COLUMNS, &shown)
    });
    if output == OutputFormat::Table && response.json["search_complete"] == false {
        output.note("the search stopped before the whole decision log was read; limit it with --since");
    }
    Ok(())
}

/// Routing settings, at every endpoint: who decides where steps go.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum RoutingCommand {
    /// Shows the routing settings.
    Get,
    /// Sets the routing settings until the next start of each router.
    Set(RoutingChangeArgs),
}

// What is set. Not a doc comment: as one it would be the help of the command.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = true)]
pub(crate) struct RoutingChangeArgs {
    /// Who decides where steps go.
    #[arg(long)]
    mode: Option<ModeArg>,
    /// In mode active, the percentage of sessions that the planner routes.
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=100))]
    rollout_percent: Option<u8>,
    /// The actions that are disabled from now on, separated by commas; all others, and with `none` all, are enabled.
    #[arg(long, value_name = "ACTION", value_delimiter = ',')]
    disabled_actions: Option<Vec<DisabledActionArg>>,
}

/// What can be disabled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
enum DisabledActionArg {
    /// Nothing.
    None,
    DecodeContinuation,
    RemotePrefill,
    ArtifactFetch,
    TailRecompute,
    StateMigration,
}

/// Converts the actions to the API's JSON.
fn disabled_actions(disabled: &[DisabledActionArg]) -> Result<Value, CtlError> {
    if disabled.len() > 1 && disabled.contains(&DisabledActionArg::None) {
        let what = "--disabled-actions: `none` cannot be combined with actions; leave out either";
        return Err(CtlError::Usage(what.into()));
    }
    Ok(disabled.iter().filter(|switch| **switch != DisabledActionArg::None).map(|switch| json!(switch)).collect())
}

const ROUTING_COLUMNS: TableColumns = "ENDPOINT /endpoint, MODE /answer/mode, ROLLOUT PERCENT /answer/rollout_percent, \
        DISABLED ACTIONS /answer/disabled_actions";

impl RoutingCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        match self {
            Self::Get => print_responses(&query_all(client, "routing").await, ROUTING_COLUMNS, output),
            Self::Set(args) => {
                let results = write_all(client, put("routing", args.json()?)).await;
                print_write_results(&results, ROUTING_COLUMNS, output)
            }
        }
    }
}

impl RoutingChangeArgs {
    /// Converts the arguments to the API's JSON.
    fn json(&self) -> Result<Value, CtlError> {
        if let (Some(ModeArg::Bypass), Some(_)) = (self.mode, self.rollout_percent) {
            let what = "--rollout-percent: has no effect in mode bypass, which plans no step; leave it out";
            return Err(CtlError::Usage(what.into()));
        }
        let mode = self.mode.map(|mode| json!(mode.routing_mode()));
        let disabled = self.disabled_actions.as_deref().map(disabled_actions).transpose()?;
        let options = [
            ("mode", mode),
            ("rollout_percent", self.rollout_percent.map(Value::from)),
            ("disabled_actions", disabled),
        ];
        let changes: Map<_, _> =
            options.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect();
        Ok(Value::Object(changes))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use vocabulary::RoutingMode;

    #[derive(Debug, Parser)]
    struct TestCommandLine {
        #[command(flatten)]
        args: DecisionListArgs,
    }

    #[test]
    fn decisions_filter_accepts_every_routing_mode() {
        for mode in ["active", "shadow", "bypass"] {
            let line = TestCommandLine::try_parse_from(["list", "--mode", mode]).unwrap();
            let [(name, value)] = &line.args.filter.query_pairs()[..] else { panic!("{mode}") };
            assert_eq!(*name, "mode");
            serde_json::from_value::<RoutingMode>(json!(value)).unwrap();
        }
        let message = TestCommandLine::try_parse_from(["list", "--mode", "own"]).unwrap_err().to_string();
        assert!(message.contains("[possible values: active, shadow, bypass]"), "{message}");
    }

    #[test]
    fn action_names_match_the_api_and_none_is_an_empty_list() {
        let words: Vec<_> =
            DisabledActionArg::value_variants().iter().filter_map(|switch| switch.to_possible_value()).collect();
        let names: Vec<_> = words.iter().map(|word| word.get_name()).collect();
        let actions: Vec<_> = planner::Action::ALL[1..].iter().map(|action| action.as_str()).collect();
        assert_eq!((names[0], &names[1..]), ("none", &actions[..]));
        assert_eq!(disabled_actions(&[DisabledActionArg::None]).unwrap(), json!([]));
        let both = [DisabledActionArg::ArtifactFetch, DisabledActionArg::StateMigration];
        assert_eq!(disabled_actions(&both).unwrap(), json!(["artifact_fetch", "state_migration"]));
        assert!(
            disabled_actions(&[DisabledActionArg::None, DisabledActionArg::ArtifactFetch])
                .unwrap_err()
                .to_string()
                .contains("cannot be combined")
        );
    }
}
