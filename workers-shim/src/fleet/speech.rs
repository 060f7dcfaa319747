//! Which dialect a worker speaks, and where those who fetch from it meet it.

use std::sync::Arc;

use vocabulary::{Carries, DpRank};

use super::config::{LinkProfile, Transfers, WorkerSpec};
use super::member::Member;
use super::probe::get_url;
use crate::dialect::{Meeting, Place, Spoken, Transfer, Unmet};
use crate::scrape::Scrape;

#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Speech {
    pub(super) spoken: Spoken,
    /// Where it is met; none as long as that is not known.
    pub(super) place: Option<Arc<Place>>,
    /// Whether it only fetches, and so is met nowhere.
    pub(super) only_fetches: bool,
    /// What keeps it from exchanging KV as it should.
    pub(super) missing: Option<Arc<str>>,
}

impl Speech {
    /// What can be handed over.
    pub(super) fn carries(&self) -> Carries {
        if self.only_fetches { Carries::PrefixesIn } else { self.spoken.dialect().carries() }
    }

    /// The fabric of the worker at `endpoint`, if it can be met; one of its own where it serves nobody unmet.
    pub(super) fn reachable(&self, fabric: Arc<str>, endpoint: &str) -> Option<Arc<str>> {
        match (&self.place, self.carries()) {
            (Some(_), _) | (None, Carries::PrefixesIn) => Some(fabric),
            (None, Carries::Prompts) => Some(format!("not met: {endpoint}").into()),
            (None, Carries::Prefixes) => None,
        }
    }

    /// A transfer from here to `target`; none where they do not understand each other, or where it is not told by what name
    /// this rank is met.
    pub(super) fn transfer(&self, target: &Self, (rank, ranks): (DpRank, u16), room: u64) -> Option<Transfer> {
        let place = self.place.as_deref().filter(|_| self.spoken == target.spoken)?.clone();
        self.spoken.dialect().order()?;
        let is_named = place.engines.is_empty() || place.engines.iter().any(|(named, _)| *named == rank);
        is_named.then_some(Transfer { spoken: self.spoken, meeting: Meeting { room, place, rank, ranks } })
    }
}

/// The dialect of a worker: as configured, as its metrics show, or NIXL where it exchanges KV by configuration alone.
pub(super) fn spoken(profile: &LinkProfile, page: &Scrape) -> Spoken {
    match (profile.transfers, profile.dialect, Spoken::shown_by(page)) {
        (Transfers::Off, _, _) | (_, Some(Spoken::Plain), _) => Spoken::Plain,
        (_, Some(declared), _) => declared,
        (Transfers::On, None, Spoken::Plain) => Spoken::Nixl,
        (Transfers::Auto, None, Spoken::Plain) if profile.fabric.is_some() => Spoken::Nixl,
        (_, None, shown) => shown,
    }
}

/// Asks the worker where it is met.
pub(super) async fn ask(client: &reqwest::Client, member: &Member, page: &Scrape) -> Speech {
    let profile = &member.spec.profile.link;
    let spoken = spoken(profile, page);
    let missing = spoken.dialect().missing(page).map(Arc::from);
    if !spoken.dialect().is_met(member.spec.role) {
        return Speech { spoken, place: None, only_fetches: true, missing };
    }
    let Some(url) = spoken.dialect().asks(&member.spec.endpoint, profile.bootstrap.as_deref()) else {
        return Speech { spoken, place: Some(Arc::default()), missing, ..Speech::default() };
    };
    let key = member.spec.api_key.as_ref().filter(|_| is_under(&url, &member.spec.endpoint));
    let answer = get_url(client, &url, key).await.map_err(|_| Unmet::Silent);
    match answer.and_then(|text| spoken.dialect().place(&url, &text)).and_then(|place| fits(place, &member.spec)) {
        Ok(place) => Speech { spoken, place: Some(Arc::new(place)), missing, ..Speech::default() },
        Err(why) => {
            let says = format!("it speaks {}, and {url} does not tell where it is met: {why}", spoken.as_str());
            Speech { spoken, missing: Some(says.into()), ..Speech::default() }
        }
    }
}

/// Whether the URL is of this endpoint, and not only of one whose port begins as its does.
fn is_under(url: &str, endpoint: &str) -> bool {
    url.strip_prefix(endpoint).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn fits(place: Place, spec: &WorkerSpec) -> Result<Place, Unmet> {
    match place.role {
        Some(role) if role != spec.role => {
            Err(Unmet::Role { is: role, configured: spec.role, endpoint: spec.endpoint.clone() })
        }
        _ => Ok(place),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(transfers: Transfers, dialect: Option<Spoken>, connector: Option<&'static str>) -> Spoken {
        let profile = LinkProfile { transfers, dialect, ..LinkProfile::default() };
        spoken(&profile, &Scrape { connector, ..Scrape::default() })
    }

    #[test]
    fn a_rank_that_its_engine_does_not_name_hands_nothing_over() {
        let place = |engines: &[u16]| {
            let engines = engines.iter().map(|rank| (DpRank(*rank), format!("engine-{rank}"))).collect();
            let place = Some(Arc::new(Place { engines, ..Place::default() }));
            Speech { spoken: Spoken::Mooncake, place, ..Speech::default() }
        };
        let to = |source: Speech, rank| source.transfer(&place(&[0]), (DpRank(rank), 2), 7).map(|it| it.meeting.rank);
        assert_eq!(to(place(&[0, 1]), 1), Some(DpRank(1)));
        assert_eq!(to(place(&[0]), 1), None);
        assert_eq!(to(place(&[]), 1), Some(DpRank(1)), "where ranks have no names");
    }

    #[test]
    fn who_only_fetches_is_reached_without_being_met_and_sends_nothing() {
        let consumer = Speech { spoken: Spoken::Mooncake, only_fetches: true, ..Speech::default() };
        assert_eq!(consumer.reachable("f".into(), "http://a:1").as_deref(), Some("f"));
        assert!(consumer.carries().serves_alone() && !consumer.carries().sends());
        assert_eq!(consumer.transfer(&consumer, (DpRank(0), 1), 7), None);
        let producer = Speech { place: Some(Arc::default()), only_fetches: false, ..consumer.clone() };
        assert!(producer.transfer(&consumer, (DpRank(0), 1), 7).is_some() && producer.carries().sends());
        let unmet = Speech { place: None, ..producer };
        assert_eq!(unmet.reachable("f".into(), "http://a:1"), None);
    }

    #[test]
    fn what_is_configured_goes_before_what_metrics_show_and_that_before_nixl() {
        use Spoken::{Mooncake, Nixl, Plain, Sglang, Store};
        assert_eq!(of(Transfers::Auto, None, None), Plain);
        assert_eq!(of(Transfers::Auto, None, Some("nixl")), Nixl);
        assert_eq!(of(Transfers::Auto, None, Some("sglang")), Sglang);
        assert_eq!(of(Transfers::Auto, Some(Store), Some("nixl")), Store);
        assert_eq!(of(Transfers::Auto, Some(Plain), Some("nixl")), Plain);
        assert_eq!(of(Transfers::On, None, None), Nixl);
        assert_eq!(of(Transfers::On, Some(Mooncake), None), Mooncake);
        assert_eq!(of(Transfers::Off, Some(Mooncake), Some("nixl")), Plain);
    }

    #[test]
    fn a_key_goes_to_no_other_port() {
        assert!(is_under("http://h:80/server_info", "http://h:80"));
        assert!(!is_under("http://h:8998/query", "http://h:899"));
    }

    #[test]
    fn only_workers_of_one_dialect_that_can_be_met_exchange() {
        let speech = |spoken, place: Option<Place>| Speech { spoken, place: place.map(Arc::new), ..Speech::default() };
        let met = Some(Place { port: 7, ..Place::default() });
        let to = |source: Speech, target| source.transfer(&speech(target, None), (DpRank(1), 2), 9);
        let transfer = to(speech(Spoken::Sglang, met.clone()), Spoken::Sglang).unwrap();
        assert_eq!((transfer.spoken, transfer.meeting.room, transfer.meeting.place.port), (Spoken::Sglang, 9, 7));
        assert_eq!(to(speech(Spoken::Sglang, met.clone()), Spoken::Nixl), None);
        assert_eq!(to(speech(Spoken::Sglang, None), Spoken::Sglang), None);
        assert_eq!(to(speech(Spoken::Plain, met), Spoken::Plain), None);
    }
}
