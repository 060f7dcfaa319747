use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;

use flate2::read::GzDecoder;
use planner::{ActionSet, ClassificationInputs, RequestProfile, SessionView, TransferPermission};
use vocabulary::{Blocks, Overlap, SessionId, Tokens, WorkerId};

use super::*;
use crate::receipt::testing::receipt;
use crate::telemetry::metrics::Metrics;

struct DecisionLogFixture {
    folder: tempfile::TempDir,
    metrics: Metrics,
    policy: Policy,
}

impl DecisionLogFixture {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), metrics: Metrics::default(), policy: Policy::default() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("decisions")
    }

    fn open(&self, bytes: usize, in_memory: usize) -> DecisionHistory {
        let log = DecisionLogParts {
            folder: &self.path(),
            policy: &self.policy,
            static_inputs: StaticPlanningInputs::default(),
            metrics: &self.metrics.decisions,
        };
        DecisionHistory::open(ReceiptBuffer::new(in_memory), DecisionLogConfig { max_size: ByteCount(bytes) }, log)
            .unwrap()
    }

    fn record_count(&self, outcome: &str) -> u64 {
        self.metrics.decisions.records.with_label_values(&[outcome]).get()
    }

    fn log_bytes(&self) -> u64 {
        fs::read_dir(self.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum()
    }
}

/// A receipt that arrived at millisecond `n`; sessions alternate.
fn receipt_at(n: u64) -> Receipt {
    Receipt { arrived_at: n, ..receipt(u128::from(n)) }
}

fn case_at(tokens: u64) -> RecordedPlanningInputs {
    RecordedPlanningInputs {
        step: ClassificationInputs { prompt_tokens: Tokens(tokens), ..ClassificationInputs::default() },
        request: RequestProfile {
            model: "m".into(),
            adapter: None,
            prompt_tokens: Tokens(tokens),
            expected_output_tokens: Tokens(1),
            expected_growth_tokens: Tokens::ZERO,
            longest_prompt_tokens: None,
            block_size: Tokens(16),
            transfers: TransferPermission::Allowed,
        },
        session: SessionView::new(SessionId(1)),
        workers: Arc::new([]),
        overlaps: vec![Overlap {
            worker: WorkerId(1),
            rank: Default::default(),
            tier: vocabulary::Tier::Hbm,
            blocks: Blocks(3),
        }],
        failed_workers: vec![WorkerId(2)],
        kv_occupancy: Some(Vec::new()),
        disabled_actions: ActionSet::NONE,
        disabled_links: Vec::new(),
    }
}

fn request_ids(found: &DecisionSearchResult) -> Vec<u128> {
    let id = |raw: &RawValue| serde_json::from_str::<filter::ReceiptFields>(raw.get()).unwrap().request_id.0;
    found.receipts.iter().map(|raw| id(raw)).collect()
}

#[test]
fn search_reads_evicted_receipts_from_disk_newest_first_without_duplicates() {
    let log = DecisionLogFixture::new();
    let decisions = log.open(16 << 20, 3);
    (1..=10).for_each(|n| decisions.record(receipt_at(n), None));
    decisions.close();
    let all = DecisionFilter::default();
    assert_eq!(request_ids(&decisions.search(&all, 100)), [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(request_ids(&decisions.search(&all, 5)), [10, 9, 8, 7, 6]);
    let odd = DecisionFilter { session: Some(SessionId(1)), until: Some(8), ..DecisionFilter::default() };
    assert_eq!(request_ids(&decisions.search(&odd, 3)), [7, 5, 3]);
    assert_eq!([2, 10, 11].map(|id| decisions.find_request(RequestId(id)).receipts.len()), [1, 1, 0]);
}

#[test]
fn the_log_stays_within_its_size_limit_and_keeps_the_newest_records() {
    let log = DecisionLogFixture::new();
    let bytes = 1 << 20;
    let decisions = log.open(bytes, 1);
    // Incompressible data, to get many files.
    let noise = |n: u64| {
        let mut case = case_at(n);
        let hash = |at: u64| xxhash_rust::xxh3::xxh3_64_with_seed(&n.to_le_bytes(), at);
        case.failed_workers = (0..200).map(|at| WorkerId(hash(at))).collect();
        case
    };
    let newest = 2_000;
    for n in 1..=newest {
        decisions.record(receipt_at(n), Some(noise(n)));
        // The queue is bounded, and this loop is faster than any disk.
        while log.record_count("written") + 1_000 < n {
            std::thread::yield_now();
        }
    }
    decisions.close();
    assert_eq!((log.record_count("written"), log.record_count("queue_full")), (newest, 0));
    assert!(log.log_bytes() <= bytes as u64, "{} bytes", log.log_bytes());
    let found = request_ids(&decisions.search(&DecisionFilter::default(), 2_000));
    assert!(found.len() > 100 && found.len() < 2_000, "{}", found.len());
    assert_eq!(found, (0..found.len() as u128).map(|n| u128::from(newest) - n).collect::<Vec<_>>());
}

#[test]
fn a_restarted_log_appends_and_records_its_own_policy() {
    let mut log = DecisionLogFixture::new();
    let before = log.policy.interference_weight;
    let first = log.open(16 << 20, 1);
    first.record(receipt_at(1), Some(case_at(100)));
    first.close();
    // Leftovers of a killed process.
    fs::write(log.path().join("decisions-5-6.jsonl.part"), "half").unwrap();
    let torn = fs::OpenOptions::new().append(true).open(log.path().join("decisions.jsonl")).unwrap();
    (&torn).write_all(b"{\"receipt\": {\"request").unwrap();
    log.policy.interference_weight = before / 2.0;
    let second = log.open(16 << 20, 1);
    second.record(receipt_at(2), Some(case_at(200)));
    second.close();
    assert_eq!(request_ids(&second.search(&DecisionFilter::default(), 10)), [2, 1]);

    let mut records = DecisionRecords::open(log.folder.path()).unwrap();
    let mut seen = Vec::new();
    while let Some(entries) = records.next_file() {
        seen.extend(entries.unwrap().into_iter().map(|entry| (entry.head.policy.interference_weight, entry.case)));
    }
    assert_eq!(seen, [(before, Some(case_at(100))), (before / 2.0, Some(case_at(200)))]);
    let torn = "decisions-0000000000001-0000000000001.jsonl.gz:3";
    assert!(matches!(&records.truncated[..], [one] if one.ends_with(torn)), "{:?}", records.truncated);
    assert_eq!(records.count, 2);
    let names: Vec<_> = fs::read_dir(log.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(names.iter().all(|name| !name.to_string_lossy().ends_with(".part")), "{names:?}");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&log.path()), 0o700);
    assert!(fs::read_dir(log.path()).unwrap().all(|file| mode(&file.unwrap().path()) == 0o600));
    let packed = fs::File::open(log.path().join("decisions-0000000000001-0000000000001.jsonl.gz")).unwrap();
    assert!(std::io::read_to_string(GzDecoder::new(packed)).unwrap().starts_with("{\"version\":2,"));
}

#[test]
fn a_file_of_version_1_is_kept_when_the_log_continues() {
    let old = include_str!("fixtures/version_1/decisions-1795662905074-1795662905163.jsonl");
    let log = DecisionLogFixture::new();
    fs::create_dir_all(log.path()).unwrap();
    fs::write(log.path().join("decisions.jsonl"), old).unwrap();
    let decisions = log.open(16 << 20, 1);
    (1..=2).for_each(|n| decisions.record(receipt_at(n), None));
    decisions.close();
    let found = request_ids(&decisions.search(&DecisionFilter::default(), 10));
    assert_eq!((&found[..2], found.len()), (&[2, 1][..], 4));
    let mut records = DecisionRecords::open(log.folder.path()).unwrap();
    let versions = std::iter::from_fn(|| records.next_file()).map(|file| file.unwrap()[0].head.version);
    assert_eq!(versions.collect::<Vec<_>>(), [2, 2], "a header is upgraded as well");
}

#[test]
fn corruption_before_the_last_line_is_an_error_with_its_position() {
    let log = DecisionLogFixture::new();
    let decisions = log.open(16 << 20, 1);
    (1..=3).for_each(|n| decisions.record(receipt_at(n), None));
    decisions.close();
    let file = log.path().join("decisions.jsonl");
    let whole = fs::read_to_string(&file).unwrap();
    let read = |text: &str| {
        fs::write(&file, text).unwrap();
        let mut records = DecisionRecords::open(log.folder.path()).unwrap();
        let entries = records.next_file().unwrap().map_err(|error| error.to_string())?;
        Ok::<_, String>((entries.len(), records.truncated.len()))
    };
    assert_eq!(read(&whole), Ok((3, 0)));
    let lines: Vec<&str> = whole.lines().collect();
    for tail in ["", "\n", "\0\0"] {
        assert_eq!(read(&format!("{}{tail}", &whole[..whole.len() - 30])), Ok((2, 1)), "{tail:?}");
    }
    let message = read(&whole.replacen(lines[2], &lines[2][..50], 1)).unwrap_err();
    assert!(message.contains("decisions.jsonl:3: ") && message.contains("accepted: "), "{message}");
    let message = read(&whole.replacen(lines[3], "{\"receipt\": {}}", 1)).unwrap_err();
    assert!(message.contains("decisions.jsonl:4: "), "a last line that is whole is no torn one: {message}");
}

#[test]
fn failed_disk_writes_are_counted_and_the_log_recovers() {
    let log = DecisionLogFixture::new();
    let decisions = log.open(16 << 20, 1);
    decisions.close();
    fs::remove_dir_all(log.path()).unwrap();
    let head = DecisionLogHeader::new(log.policy.clone(), StaticPlanningInputs::default());
    fs::create_dir_all(log.path()).unwrap();
    let writer =
        DecisionLogWriter::open(&log.path(), LogSizeLimit::of(1 << 20).unwrap(), (&head, &log.metrics.decisions))
            .unwrap();
    fs::remove_dir_all(log.path()).unwrap();
    fs::write(log.path(), "a file in its place").unwrap();
    let written = |n| writer.write(DecisionRecord { receipt: Arc::new(receipt_at(n)), case: Some(case_at(n)) });
    // The open file was deleted; a full one must be rotated, which fails.
    (1..=1_500).for_each(written);
    while log.record_count("written") + log.record_count("write_failed") < 1_500 {
        std::thread::yield_now();
    }
    let lost = log.record_count("write_failed");
    assert!(lost > 0, "nothing was refused");
    fs::remove_file(log.path()).unwrap();
    fs::create_dir_all(log.path()).unwrap();
    written(1_501);
    writer.close();
    assert_eq!(log.record_count("write_failed"), lost);
    assert!(fs::read_to_string(log.path().join("decisions.jsonl")).unwrap().contains(&RequestId(1_501).to_string()));
}

#[test]
fn a_log_without_a_size_limit_writes_nothing() {
    let log = DecisionLogFixture::new();
    let decisions = log.open(0, 2);
    (1..=4).for_each(|n| decisions.record(receipt_at(n), None));
    decisions.close();
    let found = decisions.search(&DecisionFilter::default(), 10);
    assert_eq!((request_ids(&found), found.complete), (vec![4, 3], true));
    assert!(!log.path().exists());
}

#[test]
fn opening_a_path_without_a_log_names_what_is_accepted() {
    let folder = tempfile::tempdir().unwrap();
    let told = |path: &Path| match DecisionRecords::open(path) {
        Err(error) => error.to_string(),
        Ok(mut records) => records.next_file().unwrap().unwrap_err().to_string(),
    };
    assert!(told(folder.path()).contains("holds no decision log; accepted: a router's data directory"));
    assert!(told(&folder.path().join("x")).contains("cannot read"));
    let file = folder.path().join("other.jsonl");
    for (text, problem) in
        [("{}\n", "missing field"), ("{\"version\":3,\"release\":\"9\",\"planner\":{}}\n", "version 3")]
    {
        fs::write(&file, text).unwrap();
        assert!(told(&file).contains(problem), "{}", told(&file));
    }
}
