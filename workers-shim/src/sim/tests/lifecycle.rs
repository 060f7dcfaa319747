//! Tests of disconnecting clients, dying workers, shutdown, and options.

use super::*;
use crate::sim::SimStartError;
use futures::StreamExt;

fn slow() -> SimOptions {
    let decode_step = ::vocabulary::Micros(20_000);
    SimOptions { profile: EngineProfile { decode_step, ..profile() }, ..options() }
}

fn long(stream: bool) -> Value {
    let mut ask = completion(&words(1, 20), 2_000);
    ask["stream"] = json!(stream);
    ask
}

#[tokio::test]
async fn client_disconnect_cancels_the_request() {
    let bench = SimWorkerFixture::with(slow()).await;
    for streamed in [true, false] {
        let (client, url) = (bench.client.clone(), bench.url("/v1/completions"));
        let asking = tokio::spawn(async move {
            let response = client.post(url).json(&long(streamed)).send().await.unwrap();
            response.text().await
        });
        bench.until("vllm:num_requests_running", 1.0).await;
        asking.abort();
        bench.until("vllm:num_requests_running", 0.0).await;
    }
    let aborted = "vllm:request_success_total{engine=\"0\",model_name=\"tiny\",finished_reason=\"abort\"}";
    assert_eq!(bench.metric(aborted).await, 2.0);
    assert_eq!(bench.metric("vllm:kv_cache_usage_perc").await, 0.0);
}

#[tokio::test]
async fn tokens_are_streamed_one_by_one() {
    let bench = SimWorkerFixture::with(slow()).await;
    let mut ask = long(true);
    ask["max_tokens"] = json!(10);
    let began = std::time::Instant::now();
    let mut stream = bench.send("/v1/completions", &ask).await.bytes_stream();
    stream.next().await.unwrap().unwrap();
    let first = began.elapsed();
    while stream.next().await.is_some() {}
    let whole = began.elapsed();
    assert!(whole >= Duration::from_millis(180) && first < whole - Duration::from_millis(90), "{first:?} of {whole:?}");
}

#[tokio::test]
async fn speed_up_shortens_every_step() {
    let bench = SimWorkerFixture::with(SimOptions { speed_up: 20.0, ..slow() }).await;
    let mut ask = long(false);
    ask["max_tokens"] = json!(100);
    let began = std::time::Instant::now();
    bench.ask("/v1/completions", ask).await;
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(95) && took < Duration::from_millis(1_900), "2 s in {took:?}");
}

#[tokio::test]
async fn killed_worker_breaks_its_streams_and_refuses_connections() {
    let SimWorkerFixture { worker, client } = SimWorkerFixture::with(slow()).await;
    let url = format!("http://{}/v1/completions", worker.address());
    let mut stream = client.post(&url).json(&long(true)).send().await.unwrap().bytes_stream();
    stream.next().await.unwrap().unwrap();
    drop(worker);
    let mut broken = false;
    while let Some(piece) = stream.next().await {
        broken |= piece.is_err();
    }
    assert!(broken, "the stream ends without its end");
    assert!(client.post(&url).json(&long(true)).send().await.is_err());
}

#[tokio::test]
async fn stopped_worker_finishes_running_requests() {
    let SimWorkerFixture { worker, client } = SimWorkerFixture::with(slow()).await;
    let address = worker.address();
    let mut ask = long(false);
    ask["max_tokens"] = json!(10);
    let asking = tokio::spawn(client.post(format!("http://{address}/v1/completions")).json(&ask).send());
    tokio::time::sleep(Duration::from_millis(50)).await;
    worker.stop().await;
    let body: Value = asking.await.unwrap().unwrap().json().await.unwrap();
    assert_eq!(body["usage"]["completion_tokens"], 10);
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn failed_engine_ends_streams_with_an_error_event() {
    let bench = SimWorkerFixture::with(slow()).await;
    let mut stream = bench.send("/v1/completions", &long(true)).await.bytes_stream();
    let mut told = stream.next().await.unwrap().unwrap().to_vec();
    bench.worker.break_engine();
    while let Some(piece) = stream.next().await {
        told.extend(piece.unwrap());
    }
    let text = String::from_utf8(told).unwrap();
    assert_eq!(payloads(&text).last().unwrap()["error"]["code"], 500);
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert_eq!(bench.get("/health").await.0, 503);
}

#[tokio::test]
async fn idle_worker_takes_no_steps() {
    let bench = SimWorkerFixture::new().await;
    bench.ask("/v1/completions", completion(&words(1, 20), 5)).await;
    let before = bench.worker.wakeups();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(bench.worker.wakeups() - before <= 2, "it does nothing until somebody asks");
}

#[tokio::test]
async fn invalid_options_are_refused() {
    let started = |options| SimWorker::start(options, Arc::new(TinyTokenizer));
    let wrong = EngineProfile { num_gpu_blocks: 0, ..profile() };
    assert!(matches!(started(SimOptions { profile: wrong, ..options() }).await, Err(SimStartError::Model(_))));
    assert!(matches!(started(SimOptions { speed_up: 0.0, ..options() }).await, Err(SimStartError::Option { .. })));
    let taken = SimWorkerFixture::new().await;
    let listen = taken.worker.address();
    assert!(matches!(started(SimOptions { listen, ..options() }).await, Err(SimStartError::Listen { .. })));
}

#[test]
fn committed_profiles_parse_and_build_engines() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/profiles");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let profile: EngineProfile = toml::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        profile.check().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        names.push(path.file_stem().unwrap().to_string_lossy().into_owned());
    }
    assert!(names.contains(&"h100-8b".to_owned()) && names.contains(&"demo".to_owned()));
    let h100: EngineProfile =
        toml::from_str(&std::fs::read_to_string(format!("{folder}/h100-8b.toml")).unwrap()).unwrap();
    let compute = h100.step_time(100_000, 0).0 as f64 / 1e6;
    let moved = h100.link_time(100_000 / h100.block_size).0 as f64 / 1e6;
    assert!((compute - 9.3).abs() < 0.1 && (moved - 0.33).abs() < 0.01, "{compute} s, {moved} s");
}
