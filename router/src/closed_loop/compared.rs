//! The simulated run beside the live one.

use std::collections::BTreeMap;

use serde::Serialize;
use simulator::report::Figures;

use super::live::Seen;
use crate::ctl::aligned;
use crate::demo::measure::Page;

/// What mean first tokens may differ by, and each action's share.
const FIRST_TOKEN_AIM: f64 = 0.10;
const ACTION_AIM: f64 = 0.05;

/// One figure of both.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub(super) struct Pair {
    simulated: f64,
    live: f64,
}

/// Both runs.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub(super) struct Compared {
    /// Steps that were served live.
    steps: usize,
    /// Steps whose first tokens count.
    measured: usize,
    /// Engine seconds, mean.
    first_token: Pair,
    /// Of the live ones, and of all steps, what was spent outside of the engines: proxy, client and this machine.
    outside: f64,
    /// Prompt tokens that workers computed.
    computed: Pair,
    /// Share of the steps.
    actions: BTreeMap<String, Pair>,
    /// Whether first tokens and every action are within their aims.
    agree: bool,
}

impl Pair {
    /// Live by simulated, less one.
    fn off(&self) -> f64 {
        self.live / self.simulated - 1.0
    }
}

impl Compared {
    pub(super) fn of(simulated: &Figures, (seen, slower): (&Seen, f64), (router, workers): (&Page, &[Page])) -> Self {
        let measured = seen.first_tokens.len();
        let mean = seen.first_tokens.iter().sum::<f64>() / measured.max(1) as f64;
        let computed = |page: &Page| page.sum("vllm:prompt_tokens_by_source_total", &[("source", "local_compute")]);
        let waited = |page: &Page| page.sum("vllm:time_to_first_token_seconds_sum", &[]) / slower;
        let in_engines: f64 = workers.iter().map(waited).sum();
        let taken = router.by("ownerserve_plan_actions_total", "action");
        let actions = shares(&simulated.service.actions, &taken);
        let first_token = Pair { simulated: simulated.first_token.mean, live: mean };
        let within = actions.values().all(|share| (share.live - share.simulated).abs() <= ACTION_AIM);
        Self {
            steps: seen.steps,
            measured,
            first_token,
            outside: (seen.all_first_tokens - in_engines) / seen.steps.max(1) as f64,
            computed: Pair {
                simulated: simulated.reuse.prefill_tokens as f64,
                live: workers.iter().map(computed).sum(),
            },
            actions,
            agree: within && first_token.off().abs() <= FIRST_TOKEN_AIM,
        }
    }

    pub(super) fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("figures are plain numbers and words") + "\n"
    }

    /// For people.
    pub(super) fn table(&self) -> String {
        let word = |holds: bool| if holds { "PASS" } else { "SHORT" }.to_owned();
        let mut rows = vec![["figure", "simulated", "live", "difference", "aim", ""].map(str::to_owned)];
        let first = self.first_token;
        rows.push([
            "first token, mean (s)".to_owned(),
            format!("{:.3}", first.simulated),
            format!("{:.3}", first.live),
            format!("{:+.1} %", 100.0 * first.off()),
            format!("{:.0} %", 100.0 * FIRST_TOKEN_AIM),
            word(first.off().abs() <= FIRST_TOKEN_AIM),
        ]);
        rows.push([
            "of it outside of engines (s)".to_owned(),
            "-".to_owned(),
            format!("{:.3}", self.outside),
            "-".to_owned(),
            "-".to_owned(),
            String::new(),
        ]);
        for (action, share) in &self.actions {
            let off = share.live - share.simulated;
            rows.push([
                format!("{action} (share of steps)"),
                format!("{:.1} %", 100.0 * share.simulated),
                format!("{:.1} %", 100.0 * share.live),
                format!("{:+.1} points", 100.0 * off),
                format!("{:.0} points", 100.0 * ACTION_AIM),
                word(off.abs() <= ACTION_AIM),
            ]);
        }
        let computed = self.computed;
        rows.push([
            "prompt tokens computed".to_owned(),
            format!("{:.0}", computed.simulated),
            format!("{:.0}", computed.live),
            format!("{:+.1} %", 100.0 * computed.off()),
            "-".to_owned(),
            String::new(),
        ]);
        let rows: Vec<Vec<String>> = rows.into_iter().map(Vec::from).collect();
        format!("{}{} live steps, {} of them measured\n", aligned(&rows), self.steps, self.measured)
    }
}

/// Of each action that either took.
fn shares(simulated: &BTreeMap<&'static str, usize>, live: &BTreeMap<String, f64>) -> BTreeMap<String, Pair> {
    let (all, taken): (usize, f64) = (simulated.values().sum(), live.values().sum());
    let names = simulated.keys().map(|name| (*name).to_owned()).chain(live.keys().cloned());
    let pair = |name: String| {
        let simulated = simulated.get(name.as_str()).copied().unwrap_or_default() as f64 / all.max(1) as f64;
        let live = live.get(&name).copied().unwrap_or_default() / taken.max(1.0);
        (name, Pair { simulated, live })
    };
    names.map(pair).filter(|(_, pair)| pair.simulated + pair.live > 0.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_of_either_run_are_shares_of_its_own_steps() {
        let live = BTreeMap::from([("a".to_owned(), 3.0), ("c".to_owned(), 1.0), ("d".to_owned(), 0.0)]);
        let all = shares(&BTreeMap::from([("a", 8), ("b", 2)]), &live);
        let said = all.iter().map(|(name, pair)| (name.as_str(), pair.simulated, pair.live));
        assert_eq!(said.collect::<Vec<_>>(), [("a", 0.8, 0.75), ("b", 0.2, 0.0), ("c", 0.0, 0.25)]);
    }

    #[test]
    fn what_is_beyond_an_aim_is_short() {
        let pair = |simulated, live| Pair { simulated, live };
        let compared = Compared {
            steps: 9,
            measured: 5,
            first_token: pair(1.0, 1.11),
            outside: 0.02,
            computed: pair(10.0, 10.0),
            actions: BTreeMap::from([("a".to_owned(), pair(0.50, 0.54))]),
            agree: false,
        };
        let table = compared.table();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[1].contains("+11.0 %") && lines[1].ends_with("SHORT"), "{table}");
        assert!(lines[2].contains("outside of engines") && lines[2].contains("0.020"), "{table}");
        assert!(lines[3].contains("+4.0 points") && lines[3].ends_with("PASS"), "{table}");
    }
}
