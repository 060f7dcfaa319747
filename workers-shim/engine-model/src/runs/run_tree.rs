//! Prompts as runs: stretches of tokens that every prompt takes whole or not at all. Together they form a tree.

use vocabulary::Tokens;

/// One run of a [`RunTree`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunId(pub u32);

/// Every run there is: how long it is and where it ends. A prompt is a path from the root.
#[derive(Clone, Default, Debug)]
pub struct RunTree {
    tokens: Vec<u32>,
    depth: Vec<u64>,
    parent: Vec<Option<RunId>>,
    kv_sizes: Option<RunKvSizes>,
}

/// What a model's layers keep of each run, in tokens' worth of memory, where that is not one for each of its tokens.
#[derive(Clone, Debug)]
struct RunKvSizes {
    device: Vec<u32>,
    lower: Vec<u32>,
    windows: Tokens,
}

/// What tokens of a prompt take, in tokens' worth of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvSize {
    /// In device memory, and over a link.
    pub device: Tokens,
    /// In slower tiers.
    pub lower: Tokens,
}

impl RunTree {
    /// A run of `tokens` after `parent`, or at the root.
    pub fn add(&mut self, parent: Option<RunId>, tokens: u32) -> RunId {
        let run = RunId(u32::try_from(self.tokens.len()).expect("memory ends before four billion runs"));
        let before = parent.map_or(Tokens::ZERO, |parent| self.depth(parent));
        self.tokens.push(tokens);
        self.depth.push(before.0 + u64::from(tokens));
        self.parent.push(parent);
        run
    }

    /// How long it is.
    pub fn tokens(&self, run: RunId) -> Tokens {
        Tokens(u64::from(self.tokens[run.0 as usize]))
    }

    /// The same runs for a model of which tokens take what `room` says of each range of them, and a sequence under way
    /// `windows` besides.
    pub fn with_kv_sizes(mut self, windows: Tokens, room: impl Fn(Tokens, Tokens) -> KvSize) -> Self {
        let all = (0..self.len() as u32).map(RunId);
        let rooms = all.map(|run| room(self.depth(run) - self.tokens(run), self.depth(run)));
        let short = |tokens: Tokens| u32::try_from(tokens.0).unwrap_or(u32::MAX);
        let (device, lower) = rooms.map(|room| (short(room.device), short(room.lower))).unzip();
        self.kv_sizes = Some(RunKvSizes { device, lower, windows });
        self
    }

    /// What it takes in device memory and over a link, in tokens' worth.
    pub fn device_size(&self, run: RunId) -> Tokens {
        self.kv_sizes.as_ref().map_or_else(|| self.tokens(run), |worth| Tokens(u64::from(worth.device[run.0 as usize])))
    }

    /// What it takes in slower tiers, in tokens' worth.
    pub fn lower_tier_size(&self, run: RunId) -> Tokens {
        self.kv_sizes.as_ref().map_or_else(|| self.tokens(run), |worth| Tokens(u64::from(worth.lower[run.0 as usize])))
    }

    /// What the windows of a sequence take, in tokens' worth; none where there are none.
    pub fn window_size(&self) -> Tokens {
        self.kv_sizes.as_ref().map_or(Tokens::ZERO, |worth| worth.windows)
    }

    /// Tokens from the start of a prompt to its end.
    pub fn depth(&self, run: RunId) -> Tokens {
        Tokens(self.depth[run.0 as usize])
    }

    /// The run before it.
    pub fn parent(&self, run: RunId) -> Option<RunId> {
        self.parent[run.0 as usize]
    }

    /// Where a path ends; 0 for an empty one.
    pub fn end_depth(&self, path: &[RunId]) -> Tokens {
        path.last().map_or(Tokens::ZERO, |last| self.depth(*last))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}
