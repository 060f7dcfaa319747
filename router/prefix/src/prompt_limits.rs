//! Bounds on what one request may cost here.

use smart_default::SmartDefault;
use vocabulary::Bytes;

/// Bounds on what one request may cost here.
#[derive(Clone, Copy, Debug, SmartDefault)]
pub struct PromptWorkLimits {
    /// Maximum bytes of a rendered prompt, and of canonical bytes.
    #[default(Bytes(16 << 20))]
    pub rendered_bytes: Bytes,
    /// Maximum template engine instructions per rendering.
    #[default(20_000_000)]
    pub template_steps: u64,
    /// Maximum prompts per completion request.
    #[default(1024)]
    pub prompts: usize,
    /// Memory for token ids of text segments seen before, in bytes; 0 disables the cache.
    #[default(Bytes(64 << 20))]
    pub segment_cache: Bytes,
}
