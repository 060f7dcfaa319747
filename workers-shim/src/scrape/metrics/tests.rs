use super::*;

const VLLM: &str = include_str!("../../../testdata/vllm_metrics.txt");
const NIXL: &str = include_str!("../../../testdata/vllm_nixl_metrics.txt");
const SGLANG: &str = include_str!("../../../testdata/sglang_metrics.txt");

#[test]
fn vllms_figures_are_read() {
    let scrape = Scrape::read(VLLM);
    assert_eq!(scrape.process, Some(Incarnation(1_795_225_071_620_000)));
    assert_eq!((scrape.ranks, scrape.running, scrape.waiting, scrape.kv_usage), (1, 0, 0, 0.0));
    assert_eq!(scrape.mean_prompt, Some(Tokens(3048 / 15)));
    assert_eq!(scrape.prompts, PromptSources { computed: 2696.0, cached: 352.0, transferred: 0.0 });
    let capacity = Capacity { kv: Tokens(1536), block: Tokens(32), context: Tokens(0) };
    assert_eq!((scrape.cache.capacity, scrape.cache.dtype.as_deref()), (capacity, Some("auto")));
    assert_eq!((scrape.cache.bytes_per_token, scrape.nixl), (Some(Bytes(67_108_864 / 1536)), false));
}

#[test]
fn a_worker_with_nixl_shows_it() {
    let scrape = Scrape::read(NIXL);
    assert!(scrape.nixl);
    assert_eq!((scrape.prompts.computed, scrape.expired_transfers, scrape.process), (1411.0, 0.0, None));
}

#[test]
fn sglangs_figures_are_read() {
    let scrape = Scrape::read(SGLANG);
    let capacity = Capacity { kv: Tokens(32768), block: Tokens(32), context: Tokens(32768) };
    assert_eq!((scrape.cache.capacity, scrape.running, scrape.waiting, scrape.ranks), (capacity, 0, 0, 1));
}

#[test]
fn ranks_add_up() {
    let text = "vllm:num_requests_running{engine=\"0\"} 3.0\nvllm:num_requests_running{engine=\"1\"} 2 1700000000\n\
        vllm:num_requests_waiting{engine=\"0\",x=\"a,b=\\\"}\"} 4\nvllm:num_requests_waiting{engine=\"1\"} 0\n\
        vllm:gpu_cache_usage_perc{engine=\"0\"} 0.5\nvllm:gpu_cache_usage_perc{engine=\"1\"} 1.0\n\
        vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"10\",engine=\"0\"} 1\n\
        vllm:cache_config_info{engine=\"1\",num_gpu_blocks=\"10\",block_size=\"16\"} 1\n";
    let scrape = Scrape::read(text);
    assert_eq!((scrape.ranks, scrape.running, scrape.waiting, scrape.kv_usage), (2, 5, 4, 0.75));
    assert_eq!(scrape.cache.capacity, Capacity { kv: Tokens(320), block: Tokens(16), context: Tokens(0) });
}

#[test]
fn broken_lines_are_left_out() {
    let text = "\n# HELP x\nvllm:num_requests_running\nvllm:num_requests_running{ 7\nvllm:num_requests_running{a=\"b 7\n\
        vllm:num_requests_running NaN\nvllm:num_requests_running -3\nvllm:num_requests_waiting{} 1e99\n\
        vllm:cache_config_info{block_size=\"None\",num_gpu_blocks=\"x\"} 1\nvllm:num_requests_running{engine=\"0\"} 2";
    let scrape = Scrape::read(text);
    assert_eq!((scrape.running, scrape.waiting), (2, u32::MAX));
    assert_eq!(scrape.cache.capacity, Capacity::default());
    assert_eq!(Scrape::read(""), Scrape { ranks: 1, ..Scrape::default() });
}
