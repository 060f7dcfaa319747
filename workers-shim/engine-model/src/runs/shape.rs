//! Prompts as runs: stretches of tokens that every prompt takes whole or not at all. Together they form a tree.

use vocabulary::Tokens;

/// One run of a [`Runs`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RunId(pub u32);

/// Every run there is: how long it is and where it ends. A prompt is a path from the root.
#[derive(Clone, Default, Debug)]
pub struct Runs {
    tokens: Vec<u32>,
    depth: Vec<u64>,
    parent: Vec<Option<RunId>>,
}

impl Runs {
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

    /// Tokens from the start of a prompt to its end.
    pub fn depth(&self, run: RunId) -> Tokens {
        Tokens(self.depth[run.0 as usize])
    }

    /// The run before it.
    pub fn parent(&self, run: RunId) -> Option<RunId> {
        self.parent[run.0 as usize]
    }

    /// Where a path ends; 0 for an empty one.
    pub fn end(&self, path: &[RunId]) -> Tokens {
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
