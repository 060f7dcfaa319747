//! The simulated run beside the live one.

use std::collections::BTreeMap;

use super::Both;
use crate::ctl::aligned;
use crate::demo::measure::Page;
use serde::Serialize;

/// What mean first tokens may differ by, and each action's share.
const FIRST_TOKEN_AIM: f64 = 0.10;
const ACTION_AIM: f64 = 0.05;

/// One figure of both.
#[derive(Clone, Copy, PartialEq, Serialize, Debug, Default)]
pub(super) struct Pair {
    simulated: f64,
    live: f64,
}

/// Both runs of all orders.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub(super) struct Compared {
    /// Steps that were served live.
    steps: usize,
    /// Steps whose first tokens count.
    measured: usize,
    /// Engine seconds, mean of each order's mean.
    first_token: Pair,
    /// Each order's, by its seed.
    orders: BTreeMap<u64, Pair>,
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
    /// `slower`: seconds that a live engine's second took.
    pub(super) fn of(all: &[Both], slower: f64) -> Self {
        let orders: BTreeMap<_, _> = all.iter().map(|both| (both.order.seed, first_token(both))).collect();
        let mean = |of: fn(&Pair) -> f64| orders.values().map(of).sum::<f64>() / orders.len().max(1) as f64;
        let first_token = Pair { simulated: mean(|pair| pair.simulated), live: mean(|pair| pair.live) };
        let workers = || all.iter().flat_map(|both| &both.workers);
        let waited = |page: &Page| page.sum("vllm:time_to_first_token_seconds_sum", &[]) / slower;
        let computed = |page: &Page| page.sum("vllm:prompt_tokens_by_source_total", &[("source", "local_compute")]);
        let steps = all.iter().map(|both| both.seen.steps).sum::<usize>();
        let until_first: f64 = all.iter().map(|both| both.seen.all_first_tokens).sum();
        let simulated = all.iter().flat_map(|both| &both.order.figures.service.actions);
        let simulated = simulated.map(|(action, steps)| ((*action).to_owned(), *steps as f64));
        let live = all.iter().flat_map(|both| both.router.by("ownerserve_plan_actions_total", "action"));
        let actions = shares(simulated, live);
        let within = actions.values().all(|share| (share.live - share.simulated).abs() <= ACTION_AIM);
        Self {
            steps,
            measured: all.iter().map(|both| both.seen.first_tokens.len()).sum(),
            first_token,
            outside: (until_first - workers().map(waited).sum::<f64>()) / steps.max(1) as f64,
            computed: Pair {
                simulated: all.iter().map(|both| both.order.figures.reuse.prefill_tokens as f64).sum(),
                live: workers().map(computed).sum(),
            },
            actions,
            agree: within && first_token.off().abs() <= FIRST_TOKEN_AIM,
            orders,
        }
    }

    pub(super) fn table(&self) -> String {
        let word = |holds: bool| if holds { "PASS" } else { "SHORT" }.to_owned();
        let title = ["figure", "simulated", "live", "difference", "aim", ""].map(str::to_owned);
        let mut rows = vec![title];
        let seconds = |name: String, pair: Pair| {
            let (simulated, live) = (format!("{:.3}", pair.simulated), format!("{:.3}", pair.live));
            [name, simulated, live, format!("{:+.1} %", 100.0 * pair.off()), "-".to_owned(), String::new()]
        };
        let mut first = seconds("first token, mean (s)".to_owned(), self.first_token);
        first[4] = format!("{:.0} %", 100.0 * FIRST_TOKEN_AIM);
        first[5] = word(self.first_token.off().abs() <= FIRST_TOKEN_AIM);
        rows.push(first);
        let orders = self.orders.iter().filter(|_| self.orders.len() > 1);
        rows.extend(orders.map(|(seed, order)| seconds(format!("  order of seed {seed} (s)"), *order)));
        let outside = format!("{:.3}", self.outside);
        rows.push(["of it outside of engines (s)", "-", &outside, "-", "-", ""].map(str::to_owned));
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
        let Pair { simulated, live } = self.computed;
        let off = format!("{:+.1} %", 100.0 * self.computed.off());
        let (simulated, live) = (format!("{simulated:.0}"), format!("{live:.0}"));
        rows.push(["prompt tokens computed", &simulated, &live, &off, "-", ""].map(str::to_owned));
        format!("{}{} live steps, {} of them measured\n", aligned(rows), self.steps, self.measured)
    }
}

fn first_token(both: &Both) -> Pair {
    let live = &both.seen.first_tokens;
    let mean = live.iter().sum::<f64>() / live.len().max(1) as f64;
    Pair { simulated: both.order.figures.first_token.mean, live: mean }
}

/// Of each action that either took, from how often they were.
fn shares(
    simulated: impl Iterator<Item = (String, f64)>,
    live: impl Iterator<Item = (String, f64)>,
) -> BTreeMap<String, Pair> {
    let mut taken: BTreeMap<String, Pair> = BTreeMap::new();
    simulated.for_each(|(action, steps)| taken.entry(action).or_default().simulated += steps);
    live.for_each(|(action, steps)| taken.entry(action).or_default().live += steps);
    let all = |of: fn(&Pair) -> f64| taken.values().map(of).sum::<f64>().max(1.0);
    let (simulated, live) = (all(|pair| pair.simulated), all(|pair| pair.live));
    taken.retain(|_, pair| pair.simulated + pair.live > 0.0);
    let share = |pair: Pair| Pair { simulated: pair.simulated / simulated, live: pair.live / live };
    taken.into_iter().map(|(action, pair)| (action, share(pair))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_of_either_run_are_shares_of_its_own_steps() {
        let taken = |all: &'static [(&str, f64)]| all.iter().map(|(action, steps)| ((*action).to_owned(), *steps));
        let live = taken(&[("a", 2.0), ("c", 1.0), ("d", 0.0), ("a", 1.0)]);
        let all = shares(taken(&[("a", 8.0), ("b", 2.0)]), live);
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
            orders: BTreeMap::from([(1, pair(1.0, 1.21)), (2, pair(1.0, 1.01))]),
            outside: 0.02,
            computed: pair(10.0, 10.0),
            actions: BTreeMap::from([("a".to_owned(), pair(0.50, 0.54))]),
            agree: false,
        };
        let table = compared.table();
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[1].contains("+11.0 %") && lines[1].ends_with("SHORT"), "{table}");
        assert!(lines[2].contains("order of seed 1") && lines[2].contains("+21.0 %"), "{table}");
        assert!(lines[4].contains("outside of engines") && lines[4].contains("0.020"), "{table}");
        assert!(lines[5].contains("+4.0 points") && lines[5].ends_with("PASS"), "{table}");
    }
}
