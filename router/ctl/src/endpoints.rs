//! Queries several endpoints and prints their responses side by side.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::client::{ApiResponse, OperatorClient};
use super::error::CtlError;
use super::output::OutputFormat;
use super::table::{TableColumns, cell_text, table};
use super::writes::WriteRequest;

/// Queries every endpoint; a failure becomes a row with its error and exit code.
pub(crate) async fn query_all(client: &OperatorClient, path: &str) -> Vec<Value> {
    for_each_endpoint(client, async |client| client.get(path).await).await
}

pub(crate) async fn write_all(client: &OperatorClient, request: WriteRequest) -> Vec<Value> {
    let WriteRequest { method, path, body, .. } = &request;
    for_each_endpoint(client, async |client| client.write((method.clone(), path), body, None).await).await
}

async fn for_each_endpoint(
    client: &OperatorClient,
    ask: impl AsyncFn(OperatorClient) -> Result<ApiResponse, CtlError>,
) -> Vec<Value> {
    let ask = &ask;
    let one = |endpoint: &String| {
        let (endpoint, client) = (endpoint.clone(), client.only(endpoint));
        async move { response_row(&endpoint, ask(client).await) }
    };
    futures::future::join_all(client.endpoints.iter().map(one)).await
}

/// Converts an endpoint's response to a row.
fn response_row(endpoint: &str, got: Result<ApiResponse, CtlError>) -> Value {
    match got {
        Ok(got) => json!({"endpoint": endpoint, "answer": got.json}),
        Err(error) => {
            let mut line = json!({"endpoint": endpoint, "error": error.to_string(), "code": error.exit_code(), "word": error.error_code()});
            if let Some(reason) = error.reason() {
                line["reason"] = json!(reason);
            }
            line
        }
    }
}

/// Prints the responses; fails if an endpoint did not answer.
pub(crate) fn print_responses(answers: &[Value], columns: TableColumns, output: OutputFormat) -> Result<(), CtlError> {
    output.print(&answers, || table(columns, answers));
    worst_failure(answers).map_or(Ok(()), Err)
}

/// Returns the worst failure. An unknown outcome is worse than a refusal, and a refusal worse than silence.
pub(crate) fn worst_failure(answers: &[Value]) -> Option<CtlError> {
    let of = |wanted: &[u64]| {
        let mut failed = answers.iter().filter(|answer| answer["error"].is_string());
        let found = failed.find(|answer| answer["code"].as_u64().is_some_and(|code| wanted.contains(&code)))?;
        found["error"].as_str().map(str::to_owned)
    };
    of(&[4])
        .map(CtlError::UnknownOutcome)
        .or(of(&[1, 2]).map(CtlError::Refused))
        .or(of(&[3]).map(CtlError::EndpointsUnanswered))
}

/// Prints the results of a write at every endpoint; fails if it was not done at all of them.
pub(crate) fn print_write_results(
    answers: &[Value],
    columns: TableColumns,
    output: OutputFormat,
) -> Result<(), CtlError> {
    let printed = print_responses(answers, columns, output);
    let done: Vec<String> = answers.iter().filter(|answer| answer["error"].is_null()).map(endpoint).collect();
    match printed {
        Err(CtlError::Refused(error) | CtlError::EndpointsUnanswered(error)) if !done.is_empty() => {
            Err(CtlError::PartlyDone { done: done.join(", "), error })
        }
        printed => printed,
    }
}

fn endpoint(answer: &Value) -> String {
    cell_text(answer.get("endpoint"))
}

pub(crate) fn clusters(answers: &[Value]) -> BTreeMap<String, BTreeSet<String>> {
    let mut found = BTreeMap::<_, BTreeSet<_>>::new();
    for answer in answers {
        if let Some(cluster) = answer["answer"]["cluster_id"].as_str() {
            found.entry(cluster.to_owned()).or_default().insert(endpoint(answer));
        }
    }
    found
}

/// Fails if the endpoints belong to different clusters, whose data are unrelated.
pub(crate) fn check_one_cluster(answers: &[Value]) -> Result<(), CtlError> {
    let found = clusters(answers);
    if found.len() < 2 {
        return Ok(());
    }
    let of = |(cluster, endpoints): (&String, &BTreeSet<String>)| {
        format!("{cluster}: {}", endpoints.iter().cloned().collect::<Vec<_>>().join(", "))
    };
    let detail = format!(
        "the endpoints belong to {} clusters, which share nothing. {}. One was created by mistake, or an address is \
         wrong: stop the node that belongs to the other cluster, and start it with --join and an empty data directory",
        found.len(),
        found.iter().map(of).collect::<Vec<_>>().join("; ")
    );
    Err(CtlError::refusal("Cluster mismatch", CLUSTER_MISMATCH, detail))
}

/// Error code of mixed clusters, also used as an alarm.
pub(crate) const CLUSTER_MISMATCH: &str = "cluster_mismatch";

#[cfg(test)]
mod tests {
    use super::*;

    fn done(endpoint: &str, cluster: &str) -> Value {
        json!({"endpoint": endpoint, "answer": {"cluster_id": cluster}})
    }

    fn failed(endpoint: &str, code: u8) -> Value {
        json!({"endpoint": endpoint, "error": format!("{endpoint} failed"), "code": code})
    }

    #[test]
    fn endpoints_of_different_clusters_are_reported_by_name() {
        let one = [done("a", "cluster-1"), done("b", "cluster-1"), failed("c", 3)];
        assert!(check_one_cluster(&one).is_ok());
        let two = [done("a", "cluster-1"), done("b", "cluster-2"), done("c", "cluster-1")];
        let error = check_one_cluster(&two).unwrap_err();
        assert_eq!((error.error_code(), error.exit_code()), (CLUSTER_MISMATCH, 1));
        assert!(error.to_string().contains("cluster-1: a, c; cluster-2: b"), "{error}");
    }

    #[test]
    fn exit_code_is_the_worst_failure_and_distinguishes_partial_writes() {
        let code = |answers: &[Value]| worst_failure(answers).map(|error| error.exit_code());
        assert_eq!(code(&[done("a", "1")]), None);
        assert_eq!(code(&[failed("a", 3), failed("b", 1)]), Some(1));
        assert_eq!(code(&[failed("a", 1), failed("b", 4), failed("c", 3)]), Some(4));
        let wrote = |answers: &[Value]| {
            print_write_results(answers, "", OutputFormat::Table).map_err(|error| error.exit_code())
        };
        assert_eq!(wrote(&[done("a", "1"), done("b", "1")]), Ok(()));
        assert_eq!(wrote(&[failed("a", 3), failed("b", 3)]), Err(3));
        assert_eq!(wrote(&[done("a", "1"), failed("b", 3)]), Err(6));
        assert_eq!(wrote(&[failed("a", 1), done("b", "1")]), Err(6));
        assert_eq!(wrote(&[done("a", "1"), failed("b", 4)]), Err(4), "whether it was done there is not known");
    }
}
