//! Hardware profile of a worker: its speeds, its memory and its link.

use engine_model::EngineProfile;
use engine_model::runs::{DiskSpeed, EngineTiming, MemorySizes};
use planner::ReplicateSendTiming;
use serde::Serialize;
use vocabulary::Tokens;

/// One kind of worker.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HardwareProfile {
    /// Name on the command line and in reports.
    pub name: &'static str,
    /// GPUs of one worker.
    pub gpus: u32,
    /// Speeds of the engine.
    pub timing: EngineTiming,
    /// Sizes and speeds of the memory tiers.
    pub sizes: MemorySizes,
    /// Bytes of KV per token.
    pub kv_bytes: u64,
    /// Link to the other workers, full duplex.
    pub link: LinkSpeed,
}

/// How fast KV moves between workers.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub struct LinkSpeed {
    /// Tokens of KV per second.
    pub tokens_per_second: f64,
    /// Fixed time of any transfer, in seconds.
    pub fixed: f64,
    /// When a worker sends KV that a step elsewhere requests.
    pub sources: ReplicateSendTiming,
}

impl HardwareProfile {
    /// Llama-3.1-8B-like model in BF16 on one H100 80 GB; 400 Gb/s link at 80 %, PCIe at 25 GB/s, an NVMe disk; 128 KiB
    /// per token.
    pub const H100_8B: Self = Self {
        name: "8b_h100",
        gpus: 1,
        timing: timing([1.0 / 25_000.0, 1.05e-9, 0.0065, 4.4e-8], 2_048),
        sizes: sizes(400_000, 190_000.0, 131_072),
        kv_bytes: 131_072,
        link: LinkSpeed { tokens_per_second: 305_000.0, fixed: 0.003, sources: ReplicateSendTiming::Immediate },
    };
    /// The same model on one A100 80 GB; 200 Gb/s link.
    pub const A100_8B: Self = Self {
        name: "8b_a100",
        gpus: 1,
        timing: timing([1.0 / 10_000.0, 2.9e-9, 0.0095, 7.3e-8], 1_024),
        sizes: sizes(400_000, 150_000.0, 131_072),
        kv_bytes: 131_072,
        link: LinkSpeed { tokens_per_second: 152_000.0, fixed: 0.003, sources: ReplicateSendTiming::Immediate },
    };
    /// Qwen3-30B-A3B-like model on one H200 141 GB; 96 KiB per token.
    pub const H200_30B_A3B: Self = Self {
        name: "30a3_h200",
        gpus: 1,
        timing: timing([1.0 / 30_000.0, 1.6e-9, 0.0080, 2.3e-8], 4_096),
        sizes: sizes(700_000, 254_000.0, 98_304),
        kv_bytes: 98_304,
        link: LinkSpeed { tokens_per_second: 407_000.0, fixed: 0.003, sources: ReplicateSendTiming::Immediate },
    };
    /// Llama-70B-like model, tensor-parallel over four H100; 320 KiB per token, one 400 Gb/s link per worker.
    pub const H100X4_70B: Self = Self {
        name: "70b_tp4",
        gpus: 4,
        timing: timing([1.0 / 11_000.0, 1.46e-9, 0.0160, 2.8e-8], 2_048),
        sizes: sizes(460_000, 150_000.0, 327_680),
        kv_bytes: 327_680,
        link: LinkSpeed { tokens_per_second: 122_000.0, fixed: 0.003, sources: ReplicateSendTiming::Immediate },
    };
    /// All built-in profiles.
    pub const ALL: [Self; 4] = [Self::H100_8B, Self::A100_8B, Self::H200_30B_A3B, Self::H100X4_70B];

    /// Returns the run-based model of a simulated engine with this profile, without slower tiers. It sends KV in a
    /// request of its own, as routers ask for it.
    pub fn from_profile(name: &'static str, profile: &EngineProfile) -> Self {
        let kv_bytes = profile.kv_size_per_token.0;
        let tokens_per_second = profile.link_bandwidth / kv_bytes as f64;
        let device = u64::from(profile.num_gpu_blocks) * u64::from(profile.block_size);
        Self {
            name,
            gpus: 1,
            timing: EngineTiming::of(profile),
            // There is no host tier, so its speed does not matter.
            sizes: sizes(device, 1.0, kv_bytes),
            kv_bytes,
            link: LinkSpeed {
                tokens_per_second,
                fixed: profile.link_latency.0 as f64 / 1e6,
                sources: ReplicateSendTiming::Queued,
            },
        }
    }

    /// Returns a built-in profile by name.
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|spec| spec.name == name)
    }
}

/// Builds the timing from `[prefill token, attention pair, decode step, context token]` in seconds, and the tokens of a
/// chunk. Reading the weights, which is most of a decode step, is counted once when a chunk and a decode step share the
/// batch.
const fn timing([token, pair, step, context_token]: [f64; 4], chunk: u64) -> EngineTiming {
    let (chunk, chunk_overhead, step_beside_chunk, request) = (Tokens(chunk), 0.0, 0.0, 0.0);
    EngineTiming {
        prefill_token: token,
        attention_pair: pair,
        chunk_tokens: chunk,
        chunk_overhead,
        decode_step: step,
        step_beside_chunk,
        context_token,
        decode_request: request,
    }
}

/// Sustained bytes per second of one data-center NVMe disk.
const DISK: DiskSpeed = DiskSpeed { read: 6e9, write: 3e9 };

/// Returns sizes without slower tiers, but with the speeds that these would have.
const fn sizes(device: u64, host_tokens_per_second: f64, kv_bytes: u64) -> MemorySizes {
    let disk_speed = DiskSpeed { read: DISK.read / kv_bytes as f64, write: DISK.write / kv_bytes as f64 };
    MemorySizes { device: Tokens(device), host: Tokens::ZERO, host_tokens_per_second, disk: Tokens::ZERO, disk_speed }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_takes_timing_and_sizes_from_its_hardware_profile() {
        let profile = EngineProfile { step_overhead: vocabulary::Micros(1_000), ..EngineProfile::default() };
        let spec = HardwareProfile::from_profile("own", &profile);
        assert_eq!(spec.sizes.device, Tokens(4_096 * 16));
        // One second of compute in ten chunks.
        assert!((spec.timing.prefill_time(Tokens(20_000), Tokens::ZERO) - 1.01).abs() < 1e-9);
        assert!((spec.link.tokens_per_second * spec.kv_bytes as f64 - 5e9).abs() < 1.0);
        assert!((spec.link.fixed - 0.002).abs() < 1e-12);
    }
}
