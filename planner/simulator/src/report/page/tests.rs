use super::*;
use crate::policies::PolicyKind;
use crate::report::{Figures, Planning, Subject, Times};
use crate::tests::sessions;
use crate::trace::{Limits, Trace};
use crate::{Setup, Spec, World};

const POLICIES: [PolicyKind; 3] = [PolicyKind::PrefixAffinity, PolicyKind::OwnerServe, PolicyKind::Oracle];

fn trace() -> Trace {
    sessions().within(&Limits { steps: 12, ..Limits::default() })
}

fn runs(loads: &[f64]) -> Vec<Figures> {
    let run = |load: f64, kind, seed| {
        let trace = trace().shuffled(seed);
        let setup = Setup { workers: 2, spec: Spec::H100_8B, load, seed };
        World::new(&trace, kind, setup).unwrap().run(&mut |_, _| {})
    };
    let cells = loads.iter().flat_map(|load| POLICIES.map(|kind| (*load, kind)));
    cells.flat_map(|(load, kind)| [1, 2].map(|seed| run(load, kind, seed))).collect()
}

fn report(name: &str, runs: Vec<Figures>) -> Report {
    Report::of(Subject::new(name.to_owned(), &trace(), (2, &Spec::H100_8B)), Vec::new(), runs)
}

fn count(text: &str, part: &str) -> usize {
    text.matches(part).count()
}

#[test]
fn the_page_is_whole_and_takes_nothing_from_elsewhere() {
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
fn every_plot_is_described_and_every_section_linked() {
    let html = page(&report("trace", runs(&[3.0, 6.0])));
    // Four over the load; two distributions, two bars, the mix and the time for each load.
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
fn tables_hold_what_plots_show() {
    let report = report("trace", runs(&[3.0, 6.0]));
    let html = page(&report);
    for cell in &report.cells {
        for name in ["step_mean_s", "ttft_p95_s", "moved_gb", "prefill_mtok", "measured"] {
            let metric = crate::report::Metric::named(name).unwrap();
            let said = format!("<td>{}</td>", cell.mean(name).unwrap().said(metric.digits));
            assert!(html.contains(&said), "{} of {} at {}: {said}", name, cell.policy, cell.load);
        }
    }
    assert_eq!(count(&html, "<span class=\"pass\">") + count(&html, "<span class=\"short\">"), 6);
    for definition in &report.definitions {
        assert!(html.contains(&format!("<dt>{}</dt><dd>{}</dd>", definition.name, escaped(definition.what))));
    }
}

#[test]
fn ways_of_keeping_slower_tiers_stand_beside_each_other() {
    use crate::cache::Cache;

    let all = runs(&[3.0]);
    let under = |cache| {
        let some = all.iter().filter(|run| run.policy != "oracle").cloned();
        some.map(move |mut run| {
            run.traffic.cache = Some(cache);
            run
        })
    };
    let html =
        page(&report("trace", under(Cache::Lru).chain(under(Cache::Periodic(vocabulary::Tokens(4096)))).collect()));
    // Three figures of two policies, with a bar each.
    for (said, bars) in [("Step time, mean (s)", 2), ("Time to first token, p95 (s)", 2)] {
        assert_eq!(count(&html, &format!("aria-label=\"{said} by cache management")), bars, "{said}");
    }
    assert_eq!(count(&html, ">periodic:4096</text>"), 3 * 2, "{html}");
    assert_eq!(count(&html, "from host memory</li>"), 1);
    assert!(!page(&report("trace", under(Cache::Lru).collect())).contains("by cache management"));
}

#[test]
fn how_long_decisions_took_is_told_where_somebody_looked() {
    let mut report = report("trace", runs(&[3.0]));
    assert!(page(&report).contains("Nobody took the time."));
    assert!(serde_json::to_value(&report).unwrap().get("planning").is_none(), "all else is the same everywhere");
    report.planning = vec![Planning { policy: "ownerserve", micros: Times::of(vec![10.0, 30.0]) }];
    assert!(page(&report).contains("<td>2</td><td>20.0</td><td>30.0</td>"));
}

#[test]
fn one_load_one_seed_and_no_planner_are_a_page_as_well() {
    let mut runs = runs(&[3.0]);
    runs.retain(|run| run.policy == "prefix_affinity" && run.traffic.seed == 1);
    let html = page(&report("trace", runs));
    assert!(html.contains("One load only") && html.contains("No policy that ran has words for its actions"));
    assert!(html.contains("<li>no verdict: it takes `ownerserve`") && html.contains("<li>one seed says nothing"));
}
