//! The life of a request in one engine: it starts when its memory is available, is computed, generates its answer, and
//! ends.

use vocabulary::Tokens;

use super::{ActivePrefill, PrefillStart, RunEngine, RunRequestEvent};
use crate::runs::{DecodeLocation, PrefillHandoff, RestoreTime, RunId, RunRequest, RunTree, SharedEngineState};

/// Remaining progress and work below these limits count as finished, because of rounding errors.
const TOKEN_EPSILON: f64 = 1e-6;
const WORK_EPSILON: f64 = 1e-9;
const READY_EPSILON: f64 = 1e-12;

impl RunEngine {
    /// Handles everything that is due now, and starts the next prompt. Call `advance_clock` first.
    pub fn handle_due_work(&mut self, environment: &mut SharedEngineState<'_>, out: &mut Vec<RunRequestEvent>) {
        let pace = self.progress_rates(environment);
        let (clock, progress) = (self.clock.0, self.batch.progress);
        // At large times, the remaining span can be below the resolution of the clock; it then counts as finished.
        let none_left = |seconds: f64| clock + seconds <= clock;
        let due = |ends: u64| {
            let work_left = f64::from_bits(ends) - progress;
            work_left <= TOKEN_EPSILON || none_left(work_left * pace.token)
        };
        while let Some(first) = self.batch.answers.first_entry().filter(|first| due(first.key().0)) {
            let over = first.remove();
            self.finish_request(environment, over, out);
        }
        if let Some(over) =
            self.prefilling.take_if(|now| now.work_left <= WORK_EPSILON || none_left(now.work_left / pace.prefill))
        {
            self.finish_prefill(environment, over, out);
        }
        self.begin_next_prefill(environment, out);
    }

    /// Starts the first prompt that is ready, if nothing is being computed and its memory is available.
    pub fn begin_next_prefill(&mut self, environment: &mut SharedEngineState<'_>, out: &mut Vec<RunRequestEvent>) {
        if self.prefilling.is_some() {
            return;
        }
        let ready = |prompt: &RunRequest| prompt.ready_at.0 <= self.clock.0 + READY_EPSILON;
        let Some(at) = self.queue.iter().position(ready) else { return };
        let Some(prompt) = self.queue.remove(at) else { return };
        match self.start_prefill(environment, prompt) {
            Ok(started) => out.push(RunRequestEvent::Started(started)),
            Err(prompt) => self.queue.insert(at, prompt),
        }
    }

    fn start_prefill(
        &mut self,
        environment: &mut SharedEngineState<'_>,
        prompt: RunRequest,
    ) -> Result<PrefillStart, RunRequest> {
        let runs = environment.runs;
        if let Some(shared) = &environment.shared {
            let found = shared.matched(runs, &prompt.path);
            let found = PrefixHit { local: found, fetched: found, restored: found, restoring: RestoreTime::default() };
            return Ok(self.compute(found, (prompt, Vec::new(), Tokens::ZERO)));
        }
        let local = self.pool.matched(runs, &prompt.path);
        let fetched = depth_with_fetched(runs, &prompt, local);
        let [_, until] = self.pool.matched_in_lower_tiers(runs, &prompt.path, fetched);
        let choice = self.pool.restore_choice(&*self.rule, (runs, &prompt.path), (fetched, until));
        let below = self.pool.lower_tier_hit(runs, &prompt.path, (fetched, &choice));
        let (present, missing): (Vec<RunId>, Vec<RunId>) = prompt.path.iter().partition(|run| self.pool.has(**run));
        let tail = prompt.tokens - runs.end_depth(&prompt.path);
        let need = missing.iter().map(|run| runs.device_size(*run)).sum::<Tokens>()
            + tail
            + prompt.answer
            + runs.window_size();
        self.pool.pin(runs, &present);
        if !self.pool.reserve(runs, need) {
            self.pool.unpin(runs, &present);
            return Err(prompt);
        }
        let found = prompt.path.iter().take_while(|run| runs.depth(**run) <= local).count();
        self.pool.touch(&prompt.path[..found]);
        let restoring = self.pool.lower.restore(runs, &below);
        Ok(self
            .compute(PrefixHit { local, fetched, restored: choice.compute_from, restoring }, (prompt, missing, need)))
    }

    fn compute(
        &mut self,
        found: PrefixHit,
        (prompt, missing, reserved): (RunRequest, Vec<RunId>, Tokens),
    ) -> PrefillStart {
        let computed = (prompt.tokens - found.restored).max(Tokens(1));
        let work = self.timing.prefill_time(computed, found.restored) + found.restoring.total();
        self.load.prompt = self.load.prompt + computed - prompt.expected;
        let started = PrefillStart {
            ticket: prompt.ticket,
            local: found.local,
            fetched: found.fetched - found.local,
            restored: found.restored - found.fetched,
            computed,
            work,
            restoring: found.restoring,
        };
        self.prefilling =
            Some(ActivePrefill { prompt, computed, total_work: work, work_left: work, missing, reserved });
        started
    }

    fn finish_prefill(
        &mut self,
        environment: &mut SharedEngineState<'_>,
        over: ActivePrefill,
        out: &mut Vec<RunRequestEvent>,
    ) {
        let ActivePrefill { prompt, computed, missing, mut reserved, .. } = over;
        self.load.prompt -= computed;
        self.load.work = (self.load.work - prompt.expected_work).max(0.0);
        match &mut environment.shared {
            Some(shared) => shared.put(environment.runs, &prompt.path),
            None => {
                for run in &missing {
                    let tokens = environment.runs.device_size(*run);
                    // A run that another prompt cached in the meantime is stored only once.
                    if !self.pool.fill(environment.runs, *run) {
                        self.pool.unreserve(tokens);
                    }
                    reserved -= tokens;
                }
                self.pool.pin(environment.runs, &missing);
                self.pool.touch(&prompt.path);
            }
        }
        match prompt.decode_location {
            DecodeLocation::Local => {
                out.push(RunRequestEvent::FirstToken(prompt.ticket));
                self.join_batch(prompt, reserved);
            }
            DecodeLocation::Remote => out.push(RunRequestEvent::Prefilled(PrefillHandoff { prompt, reserved })),
        }
    }

    /// Adds an answer to the batch.
    pub(super) fn join_batch(&mut self, prompt: RunRequest, reserved: Tokens) {
        self.batch.started += 1;
        self.batch.context += (prompt.tokens + Tokens(prompt.answer.0 / 2)).0;
        let ends = self.batch.progress + prompt.answer.0 as f64;
        self.batch.answers.insert((ends.to_bits(), self.batch.started), (prompt, reserved));
    }

    fn finish_request(
        &mut self,
        environment: &mut SharedEngineState<'_>,
        over: (RunRequest, Tokens),
        out: &mut Vec<RunRequestEvent>,
    ) {
        let (prompt, reserved) = over;
        let runs = environment.runs;
        self.batch.context -= (prompt.tokens + Tokens(prompt.answer.0 / 2)).0;
        self.load.requests -= 1;
        self.load.context -= prompt.tokens;
        match &mut environment.shared {
            Some(shared) => shared.put(runs, prompt.expected_history.as_deref().unwrap_or_default()),
            None => {
                self.pool.unpin(runs, &prompt.path);
                self.pool.unreserve(reserved);
                self.cache_path(runs, prompt.expected_history.as_deref().unwrap_or_default());
            }
        }
        out.push(RunRequestEvent::Finished(prompt.ticket));
    }

    /// Caches a path if it fits; returns whether it did.
    pub(super) fn cache_path(&mut self, runs: &RunTree, path: &[RunId]) -> bool {
        let (present, missing): (Vec<RunId>, Vec<RunId>) = path.iter().partition(|run| self.pool.has(**run));
        self.pool.pin(runs, &present);
        let reserved = self.pool.reserve(runs, missing.iter().map(|run| runs.device_size(*run)).sum());
        if reserved {
            missing.iter().for_each(|run| _ = self.pool.fill(runs, *run));
        }
        self.pool.unpin(runs, &present);
        if reserved {
            self.pool.touch(path);
        }
        reserved
    }
}

/// How many leading tokens of a prompt are available: locally, with those fetched for it, and with those restored from
/// slower tiers, which takes time.
struct PrefixHit {
    local: Tokens,
    fetched: Tokens,
    restored: Tokens,
    restoring: RestoreTime,
}

/// Returns the leading tokens available with the runs that were sent for the prompt, which continue the `local` ones.
fn depth_with_fetched(runs: &RunTree, prompt: &RunRequest, local: Tokens) -> Tokens {
    let (mut depth, mut sent) = (local, prompt.fetched_runs.iter().peekable());
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
