//! Prompts as sequences of runs. A run is a span of tokens that every prompt contains either completely or not at all.
//! Runs form a tree.

use vocabulary::Tokens;

/// Id of a run in a [`RunTree`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunId(pub u32);

/// All runs: their lengths and end positions. A prompt is a path from the root.
#[derive(Clone, Default, Debug)]
pub struct RunTree {
    tokens: Vec<u32>,
    depth: Vec<u64>,
    parent: Vec<Option<RunId>>,
    kv_sizes: Option<RunKvSizes>,
}

/// KV sizes of runs for models whose layers do not all keep every token, in units of one ordinary token's KV.
#[derive(Clone, Debug)]
struct RunKvSizes {
    device: Vec<u32>,
    lower: Vec<u32>,
    windows: Tokens,
}

/// KV size of a range of a prompt, in token equivalents: units of one ordinary token's KV.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvSize {
    /// In device memory, and on a link.
    pub device: Tokens,
    /// In slower tiers.
    pub lower: Tokens,
}

impl RunTree {
    /// Adds a run of `tokens` after `parent`, or at the root.
    pub fn add(&mut self, parent: Option<RunId>, tokens: u32) -> RunId {
        let run = RunId(u32::try_from(self.tokens.len()).expect("memory ends before four billion runs"));
        let before = parent.map_or(Tokens::ZERO, |parent| self.depth(parent));
        self.tokens.push(tokens);
        self.depth.push(before.0 + u64::from(tokens));
        self.parent.push(parent);
        run
    }

    /// Returns its length.
    pub fn tokens(&self, run: RunId) -> Tokens {
        Tokens(u64::from(self.tokens[run.0 as usize]))
    }

    /// Sets KV sizes for a model: `size` returns the size of each range of tokens, and every active sequence needs
    /// `windows` in addition.
    pub fn with_kv_sizes(mut self, windows: Tokens, size: impl Fn(Tokens, Tokens) -> KvSize) -> Self {
        let all = (0..self.len() as u32).map(RunId);
        let sizes = all.map(|run| size(self.depth(run) - self.tokens(run), self.depth(run)));
        let short = |tokens: Tokens| u32::try_from(tokens.0).unwrap_or(u32::MAX);
        let (device, lower) = sizes.map(|size| (short(size.device), short(size.lower))).unzip();
        self.kv_sizes = Some(RunKvSizes { device, lower, windows });
        self
    }

    /// Returns its KV size in device memory and on a link, in token equivalents.
    pub fn device_size(&self, run: RunId) -> Tokens {
        self.kv_sizes.as_ref().map_or_else(|| self.tokens(run), |worth| Tokens(u64::from(worth.device[run.0 as usize])))
    }

    /// Returns its KV size in slower tiers, in token equivalents.
    pub fn lower_tier_size(&self, run: RunId) -> Tokens {
        self.kv_sizes.as_ref().map_or_else(|| self.tokens(run), |worth| Tokens(u64::from(worth.lower[run.0 as usize])))
    }

    /// Returns the size of a sequence's windows, in token equivalents; 0 if the model has none.
    pub fn window_size(&self) -> Tokens {
        self.kv_sizes.as_ref().map_or(Tokens::ZERO, |worth| worth.windows)
    }

    /// Returns the tokens from the start of a prompt to the end of the run.
    pub fn depth(&self, run: RunId) -> Tokens {
        Tokens(self.depth[run.0 as usize])
    }

    /// Returns the preceding run.
    pub fn parent(&self, run: RunId) -> Option<RunId> {
        self.parent[run.0 as usize]
    }

    /// Returns the depth at which a path ends; 0 for an empty one.
    pub fn end_depth(&self, path: &[RunId]) -> Tokens {
        path.last().map_or(Tokens::ZERO, |last| self.depth(*last))
    }

    /// Returns the number of runs.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}
