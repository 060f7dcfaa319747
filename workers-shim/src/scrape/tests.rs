//! Tests with recorded pages, and with malformed ones.

use vocabulary::{Incarnation, Tokens, WorkerCapacity};

use super::*;

const HYBRID: &str = include_str!("../../testdata/vllm_0_32_hybrid.txt");
const PREFILL: &str = include_str!("../../testdata/vllm_0_32_nixl_prefill.txt");
const DECODE: &str = include_str!("../../testdata/vllm_0_32_nixl_decode.txt");
const OLD: &str = include_str!("../../testdata/vllm_0_6.txt");
const SGLANG: &str = include_str!("../../testdata/sglang_0_5.txt");

fn capacity(kv: u64, block: u64, context: u64) -> WorkerCapacity {
    WorkerCapacity { kv: Tokens(kv), block: Tokens(block), context: Tokens(context) }
}

#[test]
fn current_vllm_page_gives_process_memory_and_prompts() {
    let scrape = Scrape::read(HYBRID);
    assert_eq!(scrape.engine, EngineKind::Vllm);
    assert_eq!(scrape.process, Some(Incarnation(1_795_225_071_620_000)));
    assert_eq!(scrape.cache.capacity, capacity(1536, 32, 0));
    assert_eq!(scrape.cache.dtype.as_deref(), Some("auto"));
    assert_eq!((scrape.running, scrape.waiting, scrape.kv_usage), (0, 0, 0.0));
    let prompts = PromptSources { computed: Tokens(2696), cached: Tokens(352), transferred: Tokens::ZERO };
    assert_eq!(scrape.prompts, prompts);
    assert_eq!(scrape.mean_prompt, Some(Tokens(203)), "3048 tokens of 15 prompts");
    assert_eq!(scrape.mean_prefill_tokens(), Some(Tokens(203 * 2696 / 3048)), "what it found in its cache is no work");
    assert_eq!((scrape.ranks, scrape.sleep_state), (1, SleepState::Awake));
}

#[test]
fn overridden_block_count_gives_no_bytes_per_token() {
    assert_eq!(Scrape::read(HYBRID).cache.bytes_per_token, None, "the page has num_gpu_blocks_override");
    let honest = HYBRID.replace(r#"num_gpu_blocks_override="48""#, r#"num_gpu_blocks_override="None""#);
    assert_eq!(Scrape::read(&honest).cache.bytes_per_token, Some(Bytes(67_108_864 / 1536)));
}

#[test]
fn connector_shows_before_the_first_transfer_and_only_if_configured() {
    assert_eq!(Scrape::read(HYBRID).connector, None);
    assert_eq!(Scrape::read(PREFILL).connector, Some("nixl"));
    assert!(PREFILL.contains("vllm:nixl_bytes_transferred_count{engine=\"0\",model_name=\"tiny\"} 0.0"));
    let decode = Scrape::read(DECODE);
    assert_eq!(decode.connector, Some("nixl"));
    assert_eq!(decode.prompts.transferred, Tokens(1511));
}

#[test]
fn older_metric_names_are_equivalent() {
    let scrape = Scrape::read(OLD);
    assert_eq!((scrape.running, scrape.waiting, scrape.kv_usage), (3, 2, 0.4186));
    assert_eq!(scrape.cache.capacity, capacity(27_896 * 16, 16, 0));
    assert_eq!(scrape.process, Some(Incarnation(1_734_123_456_780_000)));
}

#[test]
fn sglang_metrics_are_read_by_their_own_names() {
    let scrape = Scrape::read(SGLANG);
    assert_eq!(scrape.engine, EngineKind::Sglang);
    assert_eq!(scrape.process, None, "it tells no process");
    assert_eq!(scrape.cache.capacity, capacity(32_768, 32, 32_768));
    assert_eq!(scrape.cache.max_blocks, 1_024);
    assert_eq!(scrape.prompts.computed, Tokens(110));
    assert_eq!(scrape.mean_prompt, Some(Tokens(18)), "109 tokens of 6 prompts");
    let twice = SGLANG.replace(r#"tp_rank="0""#, r#"tp_rank="1""#) + "sglang:num_running_reqs{tp_rank=\"0\"} 4\n";
    assert_eq!(Scrape::read(&twice).running, 4, "ranks of one replica are not added up");
}

#[test]
fn data_parallel_ranks_add_up_and_the_smallest_memory_counts() {
    let page = r#"
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:num_requests_waiting{engine="1"} 0.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:kv_cache_usage_perc{engine="1"} 1.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="90"} 1.0
"#;
    let scrape = Scrape::read(page);
    assert_eq!((scrape.ranks, scrape.running, scrape.waiting, scrape.kv_usage), (2, 7, 1, 0.75));
    assert_eq!(
        (scrape.cache.capacity.kv, scrape.cache.max_blocks),
        (Tokens(1440), 100),
        "for room the least, for age the most"
    );
}

#[test]
fn requests_deferred_for_remote_blocks_count_as_running() {
    let page = "vllm:num_requests_running 1\nvllm:num_requests_waiting 5\n\
                vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 2\n\
                vllm:num_requests_waiting_by_reason{reason=\"deferred\"} 3\n";
    let scrape = Scrape::read(page);
    assert_eq!((scrape.running, scrape.waiting), (4, 2));
}

#[test]
fn sleeping_engine_is_detected() {
    let asleep = HYBRID.replace(r#"sleep_state="awake"} 1.0"#, r#"sleep_state="awake"} 0.0"#);
    assert_eq!(Scrape::read(&asleep).sleep_state, SleepState::Asleep);
}

#[test]
fn unusual_label_syntax_is_parsed() {
    let page = "vllm:num_requests_running{a=\"}\",b=\"x\\\"}{\",model_name=\"a b, c=\\\"d\\\"\"} 7 1395066363000\n\
                \t vllm:num_requests_waiting\t2 \r\n\
                vllm:num_requests_waiting_by_reason{ reason=\"capacity\" , reason2=\"deferred\",} 2\n";
    let scrape = Scrape::read(page);
    assert_eq!((scrape.running, scrape.waiting), (7, 2));
}

#[test]
fn invalid_numbers_are_ignored() {
    for value in ["NaN", "-5", "-Inf", "+Inf", "x", "", "1e999", "\u{661}"] {
        let page = format!(
            "vllm:num_requests_running {value}\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc {value}\n\
             process_start_time_seconds {value}\nvllm:prompt_tokens_by_source_total{{source=\"local_compute\"}} {value}\n\
             vllm:request_prompt_tokens_sum {value}\nvllm:request_prompt_tokens_count {value}\n"
        );
        let scrape = Scrape::read(&page);
        assert_eq!((scrape.running, scrape.waiting), (0, 2), "{value:?}");
        assert!((0.0..=1.0).contains(&scrape.kv_usage), "{value:?}");
        assert_eq!(scrape.prompts, PromptSources::default(), "{value:?}");
    }
    let huge = "vllm:num_requests_running 1e300\nvllm:cache_config_info{block_size=\"99999999999\",\
                num_gpu_blocks=\"18446744073709551615\"} 1\n";
    let scrape = Scrape::read(huge);
    assert_eq!((scrape.running, scrape.cache.capacity.kv), (u32::MAX, Tokens(u64::MAX)));
}

#[test]
fn broken_line_neither_panics_nor_drops_other_lines() {
    let broken = [
        "{",
        "}",
        "a{",
        "a{b",
        "a{b=",
        "a{b=\"",
        "a{b=\"c",
        "a{b=\"c\"",
        "a{b=\"c\"}",
        "a{}",
        "{}1",
        "\"",
        "a{\"}1",
        "a{b=\"\\",
        "vllm:cache_config_info{block_size=\"",
        "vllm:num_requests_running{é=\"}\u{1F600}",
        " ",
        "\0",
    ];
    for line in broken {
        let page = format!("vllm:num_requests_waiting 2\n{line}\nvllm:num_requests_running 1");
        let scrape = Scrape::read(&page);
        assert_eq!((scrape.waiting, scrape.running), (2, 1), "{line:?}");
    }
    // Every prefix of a real page, and the page without any single byte.
    for page in [PREFILL, OLD] {
        for end in (0..page.len()).filter(|end| page.is_char_boundary(*end)) {
            Scrape::read(&page[..end]);
            Scrape::read(&page[end..]);
        }
    }
}

#[test]
fn page_is_read_only_up_to_the_limit() {
    let line = "vllm:num_requests_waiting_by_reason{reason=\"capacity\"} 0.0\n";
    let page = line.repeat(MAX_BYTES / line.len() + 1) + "vllm:num_requests_running 9\n";
    let started = std::time::Instant::now();
    assert_eq!(Scrape::read(&page).running, 0);
    assert_eq!(Scrape::read(&"x".repeat(MAX_BYTES + 1)), Scrape { ranks: 1, ..Scrape::default() });
    assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn number_of_ranks_is_bounded() {
    let page: String = (0..20_000).map(|rank| format!("vllm:num_requests_running{{engine=\"{rank}\"}} 1\n")).collect();
    let scrape = Scrape::read(&page);
    assert_eq!((scrape.ranks, scrape.running), (256, 20_000));
}
