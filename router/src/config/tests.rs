use super::*;
use vocabulary::WorkerRole;

fn load(text: &str, settings: &[&str], workers: &[&str]) -> Result<Config, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ownerserve.toml");
    std::fs::write(&path, text).unwrap();
    let own = |list: &[&str]| list.iter().map(|s| s.to_string()).collect();
    Config::load(Some(&path), &Overrides { settings: own(settings), workers: own(workers) }).map_err(|e| e.to_string())
}

#[test]
fn list_of_worker_urls_is_a_complete_configuration() {
    let config = load("", &[], &["http://127.0.0.1:8001", "http://h:2/v1/#prefill"]).unwrap();
    assert_eq!(config.proxy.listen.to_string(), "127.0.0.1:8080");
    assert_eq!(config.operator.listen.to_string(), "127.0.0.1:9464");
    assert_eq!(config.proxy.body_limit, ByteCount::mebibytes(64));
    let seen: Vec<_> = config.workers.iter().map(|w| (w.endpoint().to_string(), w.role())).collect();
    assert_eq!(
        seen,
        [("http://127.0.0.1:8001".into(), WorkerRole::Hybrid), ("http://h:2".into(), WorkerRole::Prefill)]
    );
}

#[test]
fn overrides_replace_file_values_and_keep_their_types() {
    let file = "[proxy]\nbody_limit = \"1MiB\"\n[routing]\nmode = \"shadow\"\n[[workers]]\nurl = \"http://a:1\"";
    let settings =
        ["proxy.body_limit=2KiB", "routing.mode=bypass", "routing.rollout_percent = 5", "ledger.data_dir=/tmp/x y"];
    let config = load(file, &settings, &["http://b:1#decode"]).unwrap();
    assert_eq!(config.proxy.body_limit, ByteCount(2048));
    assert_eq!(config.routing.mode, vocabulary::RoutingMode::Bypass);
    assert_eq!(u8::from(config.routing.rollout_percent), 5);
    assert_eq!(config.ledger.data_dir, PathBuf::from("/tmp/x y"));
    assert_eq!(config.workers.len(), 2);
    assert_eq!(config.workers[1].role(), WorkerRole::Decode);
}

#[test]
fn ledger_capacity_is_unset_by_default() {
    let config = load("", &[], &["http://a:1"]).unwrap();
    assert_eq!((config.ledger.max_artifacts, config.ledger.max_sessions), (None, None));
    let config =
        load("[ledger]\nmax_artifacts = 10_000_000", &["ledger.max_sessions=4000000"], &["http://a:1"]).unwrap();
    assert_eq!((config.ledger.max_artifacts, config.ledger.max_sessions), (Some(10_000_000), Some(4_000_000)));
    assert!(load("[ledger]\nmax_artifacts = -1", &[], &["http://a:1"]).unwrap_err().contains("max_artifacts"));
}

#[test]
fn errors_name_the_setting_and_the_accepted_values() {
    for (text, settings, wanted) in [
        ("[proxy]\nbody_limt = 1", &[][..], "body_limt"),
        (
            "[proxy]\nbody_limit = \"big\"",
            &[],
            "proxy.body_limit: \"big\": accepted is a size with its unit, for example \"512KiB\"",
        ),
        ("[routing]\nmode = \"fast\"", &[], "`shadow`, `bypass`, `active`"),
        (
            "",
            &["routing.rollout_percent=101"],
            "routing.rollout_percent: 101 is not a percentage: 0 to 100 is accepted",
        ),
        ("", &["retries.budget_percent=300"], "retries.budget_percent: 300 is not a percentage: 0 to 100 is accepted"),
        ("", &["routing.fallback_policy=lowest_cost"], "routing.fallback_policy: accepted is session_pinning"),
        (
            "[decision_log]\nmax_size = \"1KiB\"",
            &[],
            "decision_log.max_size: accepted is 0B, which keeps none, or 1MiB and more",
        ),
        ("", &["auth.cache_salt_secret=15-of-letters.."], "auth.cache_salt_secret: accepted are 16 characters or more"),
        ("", &["decision_log.max_size=1048575B"], "decision_log.max_size: accepted is 0B"),
        ("", &["guardrail.control_percent=51"], "guardrail.control_percent: accepted is 0 to 50"),
        ("", &["planner.lamda=1"], "lamda"),
        (
            "",
            &["planner.disabled_actions=[\"colocated_prefill\"]"],
            "planner.disabled_actions: accepted is every action but",
        ),
        ("", &["planner.admission.max_wait=61m"], "planner.admission.max_wait: accepted is 0s to 1h"),
        ("", &["planner.transfer.fixed_overhead=5"], "5 has no unit; accepted is a duration with its unit"),
        ("", &["proxy.listen=localhost"], "proxy.listen: invalid socket address syntax; accepted is IP:PORT"),
        ("", &["proxy.max_connections=0"], "proxy.max_connections: accepted is 1 to 1000000"),
        (
            "",
            &["proxy.max_unauthenticated_connections=0"],
            "proxy.max_unauthenticated_connections: accepted is 1 to 1000000",
        ),
        (
            "",
            &["proxy.max_unauthenticated_connections_per_address=0"],
            "proxy.max_unauthenticated_connections_per_address: accepted is 1 to 1000000",
        ),
        ("", &["proxy.authentication_timeout=0s"], "proxy.authentication_timeout: accepted is \"100ms\" to \"5m\""),
        ("", &["proxy.authentication_timeout=10h"], "proxy.authentication_timeout: accepted is"),
        (
            "",
            &["proxy.request_memory_limit=100MB"],
            "proxy.request_memory_limit: 100MB is less than eight times proxy.body_limit, which is 64MiB; accepted is at least 512MiB",
        ),
        (
            "",
            &["server.allowed_hosts=router.internal"],
            "server.allowed_hosts: invalid type: text, expected a list; a list is written '[\"router.internal\"]'",
        ),
        (
            "",
            &["server.allowed_hosts=[\"*.corp\"]"],
            "server.allowed_hosts[0]: \"*.corp\" is no host name; accepted is a name without scheme and port, in full",
        ),
        ("", &["server.allowed_origins=[\"https://*.corp\"]"], "is no origin; accepted is SCHEME://"),
        ("", &["tenants.a.concurrent_requests=5000000000"], "accepted is 1 to 4294967295"),
        ("", &["tenants.a.concurrent_requests=0"], "tenants.a.concurrent_requests: accepted is 1 to 4294967295"),
        ("", &["mode"], "expected PATH=VALUE"),
        ("", &[".=1"], "expected PATH=VALUE"),
        ("", &["ledger.lease_duration=0s"], "ledger.lease_duration: accepted is 1s to 1h"),
        ("[proxy]\nmax_connections = 5", &["proxy.max_connections.max=1"], "max_connections is not a section"),
        ("[[workers]]\nurl = \"ftp://a\"", &[], "workers[0].url: \"ftp://a\" is neither http nor https"),
        ("[[workers]]\nurl = \"http://a\"\n[[workers]]\nurl = \"http://a/\"", &[], "listed twice"),
        (
            "[[workers]]\nurl = \"http://a\"\nparallelism = { tensor = 0, pipeline = 1 }",
            &[],
            "workers[0].parallelism: accepted are",
        ),
        ("[[workers]]\nurl = \"http://a\"\nparallelism = { tensor = 2 }", &[], "pipeline"),
        ("[models.m]\nblock_size = 0", &[], "models.m.block_size"),
        ("[models.m]\nlora_adapters = [\"a\", \"a\"]", &[], "models.m.lora_adapters"),
        ("[models.m]\nlora_adapters = [\"\"]", &[], "models.m.lora_adapters"),
        ("[models.m]\nlora_adapters = [\"n\"]\n[models.n]", &[], "models.m.lora_adapters"),
        (
            "[server]\nallowed_hosts = [\"http://a\"]",
            &[],
            "server.allowed_hosts[0]: \"http://a\" is no host name; accepted is",
        ),
        (
            "",
            &["server.allowed_origins=[\"*\"]"],
            "server.allowed_origins[0]: \"*\" is no origin; accepted is SCHEME://",
        ),
        ("[proxy", &[], "not valid TOML"),
    ] {
        let error = load(text, settings, &[]).unwrap_err();
        assert!(error.contains(wanted), "{text} {settings:?}: {error}");
    }
    for url in ["localhost:8000", "http://", "http://u:p@h", "http://h/path", "http://h?x", "http://h#gpu", ""] {
        let error = load("", &[], &[url]).unwrap_err();
        assert!(error.contains("--worker") && error.contains("#prefill"), "{url}: {error}");
    }
    let missing = Config::load(Some(Path::new("/nonexistent.toml")), &Overrides::default()).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent.toml"));
}

#[test]
fn errors_do_not_reveal_secrets() {
    for (text, wanted) in [
        ("[auth]\ncache_salt_secret = sk-secret", "line 2, column 21, at cache_salt_secret: "),
        ("[auth]\ncache_salt_secret = \"sk-secret", "line 2, column"),
        ("[auth]\ncache_salt_secret = \"sk-secret\" x", "line 2, column"),
        ("[auth]\ncache_salt_secret = \"sk-secret\\q\"", "at cache_salt_secret: "),
        ("[[workers]]\nurl = \"http://a\"\napi_key = 'sk-secret", "line 3, column"),
        ("[shared_cache]\nredis_url = \"redis://:sk-secret@h\"\"", "line 2, column"),
        ("sk-secret", "line 1, column"),
        ("[auth]\ncache_salt_secret = \"\"\"\nsk-secret==\n\"\"\" x", "line 4, column"),
        ("[auth]\ncache_salt_secret = 5318008", "auth.cache_salt_secret: accepted is a text"),
        ("[auth]\ncache_salt_secret = [\"sk-secret\"]", "auth.cache_salt_secret: accepted is a text"),
        ("[auth]\n\"sk-secret\" = \"team-a\"", "unknown field, expected"),
        ("[auth]\ncache_salt_secrt = \"sk-secret\"", "unknown field `cache_salt_secrt`, expected"),
        ("[[workers]]\nurl = \"http://a\"\napi_key = 5318008", "workers[0].api_key: accepted is a text"),
        ("[[workers]]\nurl = \"http://a\"\napi_key = \"sk-secret\\n\"", "workers[0].api_key: it holds a line break"),
    ] {
        let error = load(text, &[], &[]).unwrap_err();
        assert!(error.contains(wanted), "{text}: {error}");
        assert!(!error.contains("sk-secret") && !error.contains("5318008"), "{text}: {error}");
    }
}

#[test]
fn a_refused_setting_or_url_is_told_without_its_value() {
    for (setting, wanted) in [
        (
            "workers=[{url=\"http://a\", api_key=\"sk-secret\"",
            "--set workers: the value is not valid TOML; accepted is",
        ),
        ("auth.cache_salt_secret=\"sk-secret", "not valid TOML"),
        ("auth={cache_salt_secret=\"sk-secret\"", "not valid TOML"),
        ("workers=sk-secret", "workers: invalid type: text, expected a list"),
        ("auth=sk-secret", "auth: invalid type: text, expected a table"),
        ("workers=[{url=\"http://u:sk-secret@h\"}]", "workers[0].url: \"...@h\" has more than"),
        ("workers=[{url=\"http://h?key=sk-secret\"}]", "workers[0].url: \"http://h\" has more than"),
        ("auth..cache_salt_secret=sk-secret", "--set auth..cache_salt_secret: expected PATH=VALUE"),
    ] {
        let error = load("", &[setting], &[]).unwrap_err();
        assert!(error.contains(wanted) && !error.contains("sk-secret"), "{setting}: {error}");
    }
    let error = load("", &[], &["http://u:sk-secret@h"]).unwrap_err();
    assert!(error.contains("--worker: \"...@h\"") && !error.contains("sk-secret"), "{error}");
    assert!(load("", &["proxy.listen=[::1]:8080"], &[]).is_ok(), "an address is no broken list");
}

#[test]
fn committed_example_matches_the_defaults_and_its_comments_parse() {
    let example = include_str!("../../../configs/ownerserve.toml");
    let defaults = format!("{:?}", Config::default());
    assert_eq!(format!("{:?}", load(example, &[], &[]).unwrap()), defaults);
    // Examples are comments of the form `# name = value` and `# [section]`.
    let is_example = |rest: &str| rest.starts_with('[') || rest.split(' ').nth(1) == Some("=");
    let shown: Vec<_> =
        example.lines().map(|line| line.strip_prefix("# ").filter(|r| is_example(r)).unwrap_or(line)).collect();
    let config = load(&shown.join("\n"), &[], &[]).unwrap();
    assert_eq!((config.workers.len(), config.models.len()), (1, 1));
    assert!(config.auth.keys_file.is_some() && config.workers[0].kv_events_replay_endpoint.is_some());
}

#[test]
fn type_errors_name_no_type_of_rust() {
    for (text, wanted) in [
        ("auth = 5", "auth: invalid type: integer `5`, expected a table"),
        ("models = []", "models: invalid type: list, expected a table"),
        ("[models]\nm = 1", "models.m: invalid type: integer `1`, expected a table"),
        ("workers = {}", "workers: invalid type: table, expected a list"),
        ("[planner]\ntiers = \"none\"", "planner.tiers: invalid type: text, expected a table"),
        (
            "[planner.tiers]\nhost_bandwidth = 20e9",
            "planner.tiers.host_bandwidth: 20000000000 has no unit; accepted is",
        ),
        (
            "[proxy]\nmax_connections = -1",
            "proxy.max_connections: invalid value: integer `-1`, expected a whole number",
        ),
        (
            "[retries]\nburst = \"many\"",
            "retries.burst: invalid type: text, expected a whole number from 0 to 4294967295",
        ),
        ("[resume]\nenabled = 1", "resume.enabled: invalid type: integer `1`, expected true or false"),
        ("[ledger]\ndata_dir = 1", "ledger.data_dir: invalid type: integer `1`, expected a text in quotes"),
        (
            "[planner]\ninterference_weight = \"x\"",
            "planner.interference_weight: invalid type: text, expected a number",
        ),
        (
            "[[workers]]\nurl = \"http://a:1\"\nparallelism = 4",
            "workers[0].parallelism: invalid type: integer `4`, expected a table",
        ),
        ("[routing]\nmode = 1", "routing.mode: "),
        ("[planner]\ndisabled_actions = [1]", "planner.disabled_actions[0]: "),
    ] {
        let error = load(text, &[], &[]).unwrap_err();
        assert!(error.contains(wanted), "{text}: {error}");
        let words = ["struct", "enum", "usize", "u32", "u64", "i64", "f64", "sequence", "map,", "Config"];
        assert!(!words.iter().any(|word| error.contains(word)), "{text}: {error}");
    }
}
