//! A request's life in one engine: it begins when its memory is there, is computed, is answered, and is over.

use vocabulary::Tokens;

use super::{Happening, Prefilling, RunEngine, Started};
use crate::runs::{Around, Prefilled, Prompt, Restoring, RunId, Runs, Where};

/// Progress and work within this of their end are there: what rounding leaves.
const TOKENS_LEFT: f64 = 1e-6;
const WORK_LEFT: f64 = 1e-9;
const READY: f64 = 1e-12;

impl RunEngine {
    /// What is due now happens, and the next prompt begins. `settle` comes first.
    pub fn happen(&mut self, around: &mut Around<'_>, out: &mut Vec<Happening>) {
        let pace = self.pace(around);
        let (clock, progress) = (self.clock.0, self.batch.progress);
        // What is left may take less time than the clock can tell at large values: it is announced for this moment.
        let none_left = |seconds: f64| clock + seconds <= clock;
        let due = |ends: u64| {
            let left = f64::from_bits(ends) - progress;
            left <= TOKENS_LEFT || none_left(left * pace.token)
        };
        while let Some(first) = self.batch.answers.first_entry().filter(|first| due(first.key().0)) {
            let over = first.remove();
            self.finish(around, over, out);
        }
        if let Some(over) = self.prefilling.take_if(|now| now.left <= WORK_LEFT || none_left(now.left / pace.prefill)) {
            self.prefilled(around, over, out);
        }
        self.begin(around, out);
    }

    /// The first prompt that is ready begins, if nothing is being computed and its memory is there.
    pub fn begin(&mut self, around: &mut Around<'_>, out: &mut Vec<Happening>) {
        if self.prefilling.is_some() {
            return;
        }
        let ready = |prompt: &Prompt| prompt.ready.0 <= self.clock.0 + READY;
        let Some(at) = self.queue.iter().position(ready) else { return };
        let Some(prompt) = self.queue.remove(at) else { return };
        match self.start(around, prompt) {
            Ok(started) => out.push(Happening::Started(started)),
            Err(prompt) => self.queue.insert(at, prompt),
        }
    }

    fn start(&mut self, around: &mut Around<'_>, prompt: Prompt) -> Result<Started, Prompt> {
        let runs = around.runs;
        if let Some(shared) = &around.shared {
            let found = shared.matched(runs, &prompt.path);
            let found = Found { local: found, fetched: found, restored: found, restoring: Restoring::default() };
            return Ok(self.compute(found, (prompt, Vec::new(), Tokens::ZERO)));
        }
        let local = self.pool.matched(runs, &prompt.path);
        let fetched = with_fetched(runs, &prompt, local);
        let [_, until] = self.pool.matched_below(runs, &prompt.path, fetched);
        let way = self.pool.way(&*self.rule, (runs, &prompt.path), (fetched, until));
        let below = self.pool.below(runs, &prompt.path, (fetched, &way));
        let (present, missing): (Vec<RunId>, Vec<RunId>) = prompt.path.iter().partition(|run| self.pool.has(**run));
        let tail = prompt.tokens - runs.end(&prompt.path);
        let need = missing.iter().map(|run| runs.room(*run)).sum::<Tokens>() + tail + prompt.answer + runs.windows();
        self.pool.pin(runs, &present);
        if !self.pool.reserve(runs, need) {
            self.pool.unpin(runs, &present);
            return Err(prompt);
        }
        let found = prompt.path.iter().take_while(|run| runs.depth(**run) <= local).count();
        self.pool.touch(&prompt.path[..found]);
        let restoring = self.pool.lower.give(runs, &below);
        Ok(self.compute(Found { local, fetched, restored: way.start, restoring }, (prompt, missing, need)))
    }

    fn compute(&mut self, found: Found, (prompt, missing, reserved): (Prompt, Vec<RunId>, Tokens)) -> Started {
        let computed = (prompt.tokens - found.restored).max(Tokens(1));
        let work = self.timing.prefill(computed, found.restored) + found.restoring.total();
        self.load.prompt = self.load.prompt + computed - prompt.expected;
        let started = Started {
            ticket: prompt.ticket,
            local: found.local,
            fetched: found.fetched - found.local,
            restored: found.restored - found.fetched,
            computed,
            work,
            restoring: found.restoring,
        };
        self.prefilling = Some(Prefilling { prompt, computed, work, left: work, missing, reserved });
        started
    }

    fn prefilled(&mut self, around: &mut Around<'_>, over: Prefilling, out: &mut Vec<Happening>) {
        let Prefilling { prompt, computed, missing, mut reserved, .. } = over;
        self.load.prompt -= computed;
        self.load.work = (self.load.work - prompt.expected_work).max(0.0);
        match &mut around.shared {
            Some(shared) => shared.put(around.runs, &prompt.path),
            None => {
                for run in &missing {
                    let tokens = around.runs.room(*run);
                    // What another prompt has cached meanwhile lies here once.
                    if !self.pool.fill(around.runs, *run) {
                        self.pool.unreserve(tokens);
                    }
                    reserved -= tokens;
                }
                self.pool.pin(around.runs, &missing);
                self.pool.touch(&prompt.path);
            }
        }
        match prompt.answered {
            Where::Here => {
                out.push(Happening::FirstToken(prompt.ticket));
                self.answer(prompt, reserved);
            }
            Where::Elsewhere => out.push(Happening::Prefilled(Prefilled { prompt, reserved })),
        }
    }

    /// An answer joins the batch.
    pub(super) fn answer(&mut self, prompt: Prompt, reserved: Tokens) {
        self.batch.begun += 1;
        self.batch.context += (prompt.tokens + Tokens(prompt.answer.0 / 2)).0;
        let ends = self.batch.progress + prompt.answer.0 as f64;
        self.batch.answers.insert((ends.to_bits(), self.batch.begun), (prompt, reserved));
    }

    fn finish(&mut self, around: &mut Around<'_>, over: (Prompt, Tokens), out: &mut Vec<Happening>) {
        let (prompt, reserved) = over;
        let runs = around.runs;
        self.batch.context -= (prompt.tokens + Tokens(prompt.answer.0 / 2)).0;
        self.load.requests -= 1;
        self.load.context -= prompt.tokens;
        match &mut around.shared {
            Some(shared) => shared.put(runs, prompt.resent.as_deref().unwrap_or_default()),
            None => {
                self.pool.unpin(runs, &prompt.path);
                self.pool.unreserve(reserved);
                self.keep(runs, prompt.resent.as_deref().unwrap_or_default());
            }
        }
        out.push(Happening::Finished(prompt.ticket));
    }

    /// Prompt and answer stay cached if they fit; whether they do.
    pub(super) fn keep(&mut self, runs: &Runs, path: &[RunId]) -> bool {
        let (present, missing): (Vec<RunId>, Vec<RunId>) = path.iter().partition(|run| self.pool.has(**run));
        self.pool.pin(runs, &present);
        let kept = self.pool.reserve(runs, missing.iter().map(|run| runs.room(*run)).sum());
        if kept {
            missing.iter().for_each(|run| _ = self.pool.fill(runs, *run));
        }
        self.pool.unpin(runs, &present);
        if kept {
            self.pool.touch(path);
        }
        kept
    }
}

/// How deep a prompt reaches: in memory, with what was sent for it, and with what slower tiers hold, which takes time.
struct Found {
    local: Tokens,
    fetched: Tokens,
    restored: Tokens,
    restoring: Restoring,
}

/// How deep a prompt reaches with the runs that were sent for it, which go on from the `local` ones.
fn with_fetched(runs: &Runs, prompt: &Prompt, local: Tokens) -> Tokens {
    let (mut depth, mut sent) = (local, prompt.fetched.iter().peekable());
    for run in prompt.path.iter() {
        let was_sent = sent.next_if(|next| *next == run).is_some();
        if runs.depth(*run) <= local {
            continue;
        }
        if !was_sent {
            break;
        }
        depth = runs.depth(*run);
    }
    depth
}
