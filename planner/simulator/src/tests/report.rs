use super::readers::sessions;
use crate::policies::PolicyKind;
use crate::report::{Figures, Times, csv, table};
use crate::trace::Limits;
use crate::{Setup, Spec, World};

fn figures() -> Figures {
    let trace = sessions().within(&Limits::default());
    let setup = Setup { workers: 2, spec: Spec::A100_8B, load: 4.0, seed: 1 };
    World::new(&trace, PolicyKind::PrefixAffinity, setup).unwrap().run(&mut |_, _| {})
}

#[test]
fn a_run_is_a_row_under_its_columns() {
    let figures = figures();
    let rows = table(&[figures.clone(), figures.clone()]);
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| row.len() == rows[0].len()));
    assert_eq!(rows[1], rows[2]);
    let cell = |name: &str| &rows[1][rows[0].iter().position(|column| column == name).unwrap()];
    assert_eq!((cell("policy").as_str(), cell("load").as_str()), ("prefix_affinity", "4"));
    assert_eq!(*cell("ttft_mean_s"), format!("{:.3}", figures.first_token.mean));
    let csv = csv(&[figures]);
    assert_eq!(csv.lines().count(), 2);
    assert!(csv.starts_with("policy,load,seed,steps,unserved,ttft_mean_s,"));
}

#[test]
fn the_json_names_every_figure() {
    let json = serde_json::to_value(figures()).unwrap();
    for place in
        ["/first_token/p95", "/reuse/prefill_tokens", "/memory/duplicate_factor", "/service/sessions_per_gpu_hour"]
    {
        assert!(json.pointer(place).is_some_and(serde_json::Value::is_number), "{place}");
    }
    assert_eq!(json["service"]["unplanned"], 0);
    let occupancy = json["memory"]["occupancy"].as_f64().unwrap();
    assert!((0.1..1.0).contains(&occupancy), "{occupancy}");
}

#[test]
fn times_are_ranked_by_how_many_are_shorter() {
    assert_eq!(Times::of(Vec::new()), Times::default());
    let times = Times::of((0..100).rev().map(f64::from).collect());
    assert_eq!(times, Times { mean: 49.5, p50: 50.0, p95: 95.0, p99: 99.0 });
}

#[test]
fn every_kind_of_worker_is_found_by_its_name() {
    for spec in Spec::ALL {
        assert_eq!(Spec::named(spec.name), Some(spec));
    }
    assert_eq!(Spec::named("none"), None);
}
