use super::*;
use crate::policies::PolicyKind;
use crate::report::{DecisionLatency, ReportSubject, RunStats, TimeDistribution};
use crate::tests::sessions;
use crate::trace::{ReplayLimits, Trace};
use crate::{HardwareProfile, Simulation, SimulationSetup};

const POLICIES: [PolicyKind; 3] = [PolicyKind::PrefixAffinity, PolicyKind::OwnerServe, PolicyKind::Oracle];

fn trace() -> Trace {
    sessions().apply_limits(&ReplayLimits { max_steps: 12, ..ReplayLimits::default() })
}

fn runs(loads: &[f64]) -> Vec<RunStats> {
    let run = |load: f64, kind, seed| {
        let trace = trace().shuffled(seed);
        let setup = SimulationSetup { workers: 2, spec: HardwareProfile::H100_8B, load, seed };
        Simulation::new(&trace, kind, setup).unwrap().run(&mut |_, _| {})
    };
    let cells = loads.iter().flat_map(|load| POLICIES.map(|kind| (*load, kind)));
    cells.flat_map(|(load, kind)| [1, 2].map(|seed| run(load, kind, seed))).collect()
}

fn report(name: &str, runs: Vec<RunStats>) -> SimulationReport {
    SimulationReport::of(
        ReportSubject::new(name.to_owned(), &trace(), (2, &HardwareProfile::H100_8B)),
        Vec::new(),
        runs,
    )
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn page_is_well_formed_and_self_contained() {
    let html = page(&report("some <trace> & \"more\"", runs(&[3.0, 6.0])));
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</body></html>\n"));
    assert!(html.contains("<h1>OwnerServe simulation of some &lt;trace&gt; &amp; &quot;more&quot;</h1>"));
    for outside in ["http://", "https://", "src=", "<script", "@import", "url(", "NaN", "inf\""] {
        assert!(!html.contains(outside), "{outside}");
    }
    for tag in ["svg", "table", "section", "figure", "details", "ul", "g", "div", "dl", "title", "text"] {
        let opened = count(&html, &format!("<{tag}>")) + count(&html, &format!("<{tag} "));
        assert_eq!(opened, count(&html, &format!("</{tag}>")), "{tag}");
    }
}

#[test]
fn every_plot_has_a_description_and_every_section_a_link() {
    let html = page(&report("trace", runs(&[3.0, 6.0])));
    // Four plots over the load; per load two distributions, two bar charts, the action mix and the step time.
    assert_eq!(count(&html, "role=\"img\""), 4 + 2 * (2 + 2 + 1 + 1));
    assert_eq!(count(&html, "role=\"img\""), count(&html, "role=\"img\" aria-label=\""));
    for (id, ..) in SECTIONS {
        assert_eq!(
            (count(&html, &format!("href=\"#{id}\">")) >= 1, count(&html, &format!("id=\"{id}\""))),
            (true, 1),
            "{id}"
        );
    }
    assert_eq!(
        count(&html, "<div class=\"scroll\" tabindex=\"0\""),
        count(&html, "<table>"),
        "a keyboard scrolls each"
    );
    for kind in POLICIES {
        assert_eq!(count(&html, &format!("id=\"show-{}\" checked", kind.as_str())), 1);
    }
}

#[test]
fn tables_contain_the_values_of_the_plots() {
    let report = report("trace", runs(&[3.0, 6.0]));
    let html = page(&report);
    for cell in &report.cells {
        for name in ["step_mean_s", "ttft_p95_s", "transferred_gb", "prefill_mtok", "measured"] {
            let metric = crate::report::Metric::by_name(name).unwrap();
            let text = format!("<td>{}</td>", cell.mean(name).unwrap().format(metric.digits));
            assert!(html.contains(&text), "{} of {} at {}: {text}", name, cell.policy, cell.load);
        }
    }
    assert_eq!(count(&html, "<span class=\"pass\">") + count(&html, "<span class=\"short\">"), 6);
    for definition in &report.definitions {
        assert!(html.contains(&format!("<dt>{}</dt><dd>{}</dd>", definition.name, escaped(definition.what))));
    }
}

#[test]
fn tier_policies_are_plotted_side_by_side() {
    use crate::tier_policy::TierPolicy;

    let all = runs(&[3.0]);
    let under = |cache| {
        let some = all.iter().filter(|run| run.policy != "oracle").cloned();
        some.map(move |mut run| {
            run.traffic.tier_policy = Some(cache);
            run
        })
    };
    let html = page(&report(
        "trace",
        under(TierPolicy::Lru).chain(under(TierPolicy::Periodic(vocabulary::Tokens(4096)))).collect(),
    ));
    // Three figures for each of two policies, with one bar per tier policy.
    for (said, bars) in [("Step time, mean (s)", 2), ("Time to first token, p95 (s)", 2)] {
        assert_eq!(count(&html, &format!("aria-label=\"{said} by tier policy")), bars, "{said}");
    }
    assert_eq!(count(&html, ">periodic:4096</text>"), 3 * 2, "{html}");
    assert_eq!(count(&html, "from host memory</li>"), 1);
    assert!(!page(&report("trace", under(TierPolicy::Lru).collect())).contains("by tier policy"));
}

#[test]
fn decision_latency_appears_only_when_measured() {
    let mut report = report("trace", runs(&[3.0]));
    assert!(page(&report).contains("Nobody took the time."));
    assert!(serde_json::to_value(&report).unwrap().get("planning").is_none(), "all else is the same everywhere");
    report.planning = vec![DecisionLatency { policy: "ownerserve", micros: TimeDistribution::of(vec![10.0, 30.0]) }];
    assert!(page(&report).contains("<td>2</td><td>20.0</td><td>30.0</td>"));
}

#[test]
fn page_renders_with_one_load_one_seed_and_no_planner() {
    let mut runs = runs(&[3.0]);
    runs.retain(|run| run.policy == "prefix_affinity" && run.traffic.seed == 1);
    let html = page(&report("trace", runs));
    assert!(html.contains("One load only") && html.contains("No policy that ran has words for its actions"));
    assert!(html.contains("<li>no verdict: it takes `ownerserve`") && html.contains("<li>one seed says nothing"));
}
