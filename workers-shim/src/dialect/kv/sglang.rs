//! SGLang's prefill and decode workers: the same three fields in both legs, sent at once. The source's bootstrap server
//! brings them together by the room. Such workers take no other requests, and the source leg's token is the answer's
//! first, so both legs ask for the same.

use serde::Deserialize;
use serde_json::json as value;
use vocabulary::Role;

use super::{Carries, Dialect, Fields, Handoff, Meeting, Order, Place, Scrape, SourceAnswer, Unmet, json};

const PATH: &str = "/server_info";

pub(super) struct Speaker;

fn room(meeting: &Meeting) -> u64 {
    // Positive as a signed number; older engines take it modulo the ranks for the source's rank.
    let ranks = u64::from(meeting.ranks.max(1));
    let room = (meeting.room >> 2) / ranks * ranks;
    room + u64::from(meeting.rank.0) % ranks
}

impl Dialect for Speaker {
    fn order(&self) -> Option<Order> {
        Some(Order::Together)
    }

    fn carries(&self) -> Carries {
        Carries::Prompts
    }

    fn source_answer(&self) -> SourceAnswer {
        SourceAnswer::AsAsked
    }

    fn reserved(&self) -> &'static [&'static str] {
        &["bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"]
    }

    fn at_source(&self, meeting: &Meeting) -> Fields {
        vec![
            ("bootstrap_host", json(value!(meeting.place.address))),
            ("bootstrap_port", json(value!(meeting.place.port))),
            ("bootstrap_room", json(value!(room(meeting)))),
        ]
    }

    fn at_target(&self, meeting: &Meeting, _: Option<Handoff>) -> Fields {
        let mut fields = self.at_source(meeting);
        if meeting.ranks > 1 {
            fields.push(("disagg_prefill_dp_rank", json(value!(meeting.rank.0))));
        }
        fields
    }

    fn shown_by(&self, page: &Scrape) -> bool {
        page.connector == Some("sglang")
    }

    fn asks(&self, endpoint: &str, _: Option<&str>) -> Option<String> {
        Some(format!("{endpoint}{PATH}"))
    }

    fn place(&self, asked: &str, answer: &str) -> Result<Place, Unmet> {
        let told: Told = serde_json::from_str(answer).map_err(|_| Unmet::NoServerInfo)?;
        let mode = told.disaggregation_mode.unwrap_or_default();
        let role = [Role::Prefill, Role::Decode].into_iter().find(|role| role.as_str() == mode);
        if role.is_none() {
            return Err(Unmet::Mode(mode));
        }
        let host = crate::events::host_of(asked).trim_matches(['[', ']']).to_owned();
        let port = told.disaggregation_bootstrap_port.ok_or(Unmet::NoPort)?;
        Ok(Place { address: host, port, role, ..Place::default() })
    }
}

/// Of its `/server_info`.
#[derive(Deserialize)]
struct Told {
    disaggregation_mode: Option<String>,
    disaggregation_bootstrap_port: Option<u16>,
}
