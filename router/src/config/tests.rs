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
    assert_eq!(config.proxy.body_limit, units::ByteCount::mebibytes(64));
    let seen: Vec<_> = config.workers.iter().map(|w| (w.endpoint().to_string(), w.role())).collect();
    assert_eq!(
        seen,
        [("http://127.0.0.1:8001".into(), WorkerRole::Hybrid), ("http://h:2".into(), WorkerRole::Prefill)]
    );
}

#[test]
fn overrides_replace_file_values_and_keep_their_types() {
    let file = "[proxy]\nbody_limit = \"1MiB\"\n[steering]\nmode = \"shadow\"\n[[workers]]\nurl = \"http://a:1\"";
    let settings =
        ["proxy.body_limit=2048", "steering.mode=sticky", "steering.rollout_percent = 5", "ledger.data_dir=/tmp/x y"];
    let config = load(file, &settings, &["http://b:1#decode"]).unwrap();
    assert_eq!(config.proxy.body_limit, units::ByteCount(2048));
    assert_eq!(config.steering.mode, crate::pipeline::routing::RoutingMode::Sticky);
    assert_eq!(u8::from(config.steering.rollout_percent), 5);
    assert_eq!(config.ledger.data_dir, PathBuf::from("/tmp/x y"));
    assert_eq!(config.workers.len(), 2);
    assert_eq!(config.workers[1].role(), WorkerRole::Decode);
}

#[test]
fn ledger_capacity_is_unset_by_default() {
    let config = load("", &[], &["http://a:1"]).unwrap();
    assert_eq!((config.ledger.artifacts, config.ledger.sessions), (None, None));
    let config = load("[ledger]\nartifacts = 10_000_000", &["ledger.sessions=4000000"], &["http://a:1"]).unwrap();
    assert_eq!((config.ledger.artifacts, config.ledger.sessions), (Some(10_000_000), Some(4_000_000)));
    assert!(load("[ledger]\nartifacts = -1", &[], &["http://a:1"]).unwrap_err().contains("artifacts"));
}

#[test]
fn errors_name_the_setting_and_the_accepted_values() {
    for (text, settings, wanted) in [
        ("[proxy]\nbody_limt = 1", &[][..], "body_limt"),
        ("[proxy]\nbody_limit = \"big\"", &[], "proxy.body_limit: \"big\" is not a size like \"512KiB\""),
        ("[steering]\nmode = \"fast\"", &[], "`shadow`, `sticky`, `own`"),
        (
            "",
            &["steering.rollout_percent=101"],
            "steering.rollout_percent: 101 is not a percentage: 0 to 100 is accepted",
        ),
        ("", &["retries.percent=300"], "retries.percent: 300 is not a percentage: 0 to 100 is accepted"),
        ("", &["steering.bypass=own"], "steering.bypass: accepted is session_pinning"),
        ("[decisions]\nlog = \"1KiB\"", &[], "decisions.log: accepted is 0, which keeps none, or 1MiB and more"),
        ("", &["decisions.log=1048575"], "decisions.log: accepted is 0"),
        ("", &["guardrail.control_percent=51"], "guardrail.control_percent: accepted is 0 to 50"),
        ("", &["planner.lamda=1"], "lamda"),
        ("", &["planner.disabled=[\"colocated_prefill\"]"], "planner.disabled: accepted is every action but"),
        ("", &["planner.admission.longest=3600000001"], "planner.admission.longest: accepted is 0 to 3600000000"),
        ("", &["planner.transfer.fixed=5s"], "accepted are whole microseconds, for example 2000000"),
        ("", &["proxy.listen=localhost"], "proxy.listen: invalid socket address syntax; accepted is IP:PORT"),
        ("", &["proxy.connections=0"], "proxy.connections: accepted is 1 to 1000000"),
        ("", &["proxy.unauthenticated_connections=0"], "proxy.unauthenticated_connections: accepted is 1 to 1000000"),
        ("", &["proxy.unauthenticated_per_address=0"], "proxy.unauthenticated_per_address: accepted is 1 to 1000000"),
        ("", &["proxy.authentication_timeout=0s"], "proxy.authentication_timeout: accepted is \"100ms\" to \"5m\""),
        ("", &["proxy.authentication_timeout=10h"], "proxy.authentication_timeout: accepted is"),
        (
            "",
            &["proxy.memory=100MB"],
            "proxy.memory: 100000000 bytes is less than eight times proxy.body_limit, which is 64MiB; accepted is at least 512MiB",
        ),
        (
            "",
            &["server.allowed_hosts=router.internal"],
            "server.allowed_hosts: invalid type: text, expected a sequence; a list is written '[\"router.internal\"]'",
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
        ("", &["ledger.lease=0s"], "ledger.lease: accepted is 1s to 1h"),
        ("[proxy]\nconnections = 5", &["proxy.connections.max=1"], "connections is not a section"),
        ("[[workers]]\nurl = \"ftp://a\"", &[], "workers[0].url: \"ftp://a\" is neither http nor https"),
        ("[[workers]]\nurl = \"http://a\"\n[[workers]]\nurl = \"http://a/\"", &[], "listed twice"),
        (
            "[[workers]]\nurl = \"http://a\"\nshape = { tensor = 0, pipeline = 1 }",
            &[],
            "workers[0].shape: accepted are",
        ),
        ("[[workers]]\nurl = \"http://a\"\nshape = { tensor = 2 }", &[], "pipeline"),
        ("[models.m]\nblock = 0", &[], "models.m.block"),
        ("[models.m]\nadapters = [\"a\", \"a\"]", &[], "models.m.adapters"),
        ("[models.m]\nadapters = [\"\"]", &[], "models.m.adapters"),
        ("[models.m]\nadapters = [\"n\"]\n[models.n]", &[], "models.m.adapters"),
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
        ("[auth]\nsalt_secret = sk-secret", "line 2, column 15, at salt_secret: "),
        ("[auth]\nsalt_secret = \"sk-secret", "line 2, column"),
        ("[auth]\nsalt_secret = \"sk-secret\" x", "line 2, column"),
        ("[auth]\nsalt_secret = \"sk-secret\\q\"", "at salt_secret: "),
        ("[[workers]]\nurl = \"http://a\"\napi_key = 'sk-secret", "line 3, column"),
        ("[soft_state]\nredis = \"redis://:sk-secret@h\"\"", "line 2, column"),
        ("sk-secret", "line 1, column"),
        ("[auth]\nsalt_secret = \"\"\"\nsk-secret==\n\"\"\" x", "line 4, column"),
        ("[auth]\nsalt_secret = 5318008", "auth.salt_secret: accepted is a text"),
        ("[auth]\nsalt_secret = [\"sk-secret\"]", "auth.salt_secret: accepted is a text"),
        ("[auth]\n\"sk-secret\" = \"team-a\"", "unknown field, expected"),
        ("[auth]\nsalt_secrt = \"sk-secret\"", "unknown field `salt_secrt`, expected"),
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
        ("auth.salt_secret=\"sk-secret", "not valid TOML"),
        ("auth={salt_secret=\"sk-secret\"", "not valid TOML"),
        ("workers=sk-secret", "workers: invalid type: text, expected a sequence"),
        ("auth=sk-secret", "auth: invalid type: text, expected struct AuthConfig"),
        ("workers=[{url=\"http://u:sk-secret@h\"}]", "workers[0].url: \"...@h\" has more than"),
        ("workers=[{url=\"http://h?key=sk-secret\"}]", "workers[0].url: \"http://h\" has more than"),
        ("auth..salt_secret=sk-secret", "--set auth..salt_secret: expected PATH=VALUE"),
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
    assert!(config.auth.keys_file.is_some() && config.workers[0].replay.is_some());
}
