//! Records in key order from a given key on, for paged listings.

use std::collections::BTreeSet;
use std::ops::Bound;

use vocabulary::{ArtifactGroupId, ArtifactId, SessionId, TenantId, WorkerId};

use crate::artifact::Artifact;
use crate::ledger::Ledger;
use crate::record::{Intent, Session, Worker};

/// Returns the range after `after`, or the full range.
fn range_after<K>(after: Option<K>) -> (Bound<K>, Bound<K>) {
    (after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded)
}

impl Ledger {
    /// Iterates over the sessions after `after`, by id.
    pub fn sessions_after(&self, after: Option<SessionId>) -> impl Iterator<Item = Session> {
        let from = self.records.sessions.iter_from(after.unwrap_or(SessionId(0)));
        from.filter(move |session| Some(session.id) != after)
    }

    /// Iterates over the artifacts after `after`, by id.
    pub fn artifacts_after(&self, after: Option<ArtifactId>) -> impl Iterator<Item = Artifact> {
        let from = self.records.artifacts.iter_from(after.unwrap_or(ArtifactId(0)));
        from.filter(move |(id, _)| Some(*id) != after).map(|(id, stored)| stored.unpack(id))
    }

    /// Iterates over the workers after `after`, by id.
    pub fn workers_after(&self, after: Option<WorkerId>) -> impl Iterator<Item = &Worker> {
        self.records.workers.range(range_after(after)).map(|(_, worker)| &**worker)
    }

    /// Iterates over the sessions after `after` that have intents, each with its intents.
    pub fn intents_after(&self, after: Option<SessionId>) -> impl Iterator<Item = (SessionId, Vec<Intent>)> {
        let now = self.records.clock;
        let live = move |all: &[Intent]| all.iter().filter(|intent| intent.expires > now).copied().collect();
        self.records.intents.range(range_after(after)).map(move |(session, all)| (*session, live(all)))
    }

    /// Iterates over the groups after `after`, by id.
    pub fn groups_after(&self, after: Option<ArtifactGroupId>) -> impl Iterator<Item = ArtifactGroupId> {
        let next = |after: Option<ArtifactGroupId>| {
            let from = after.map(|group| (group, ArtifactId(u128::MAX)));
            self.index.groups.range(range_after(from)).next().map(|(group, _)| *group)
        };
        std::iter::successors(next(after), move |group| next(Some(*group)))
    }

    /// Iterates over the tenants after `after` that have records or a quota, by name.
    pub fn tenants_after(&self, after: Option<TenantId>) -> impl Iterator<Item = TenantId> {
        let has = self.index.usage.range(range_after(after.clone())).map(|(tenant, _)| tenant);
        let bounded = self.quotas().map(|(tenant, _)| tenant);
        let bounded = bounded.filter(|tenant| after.as_ref().is_none_or(|after| *tenant > after));
        has.chain(bounded).cloned().collect::<BTreeSet<_>>().into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LedgerFixture, chain, session, step};
    use crate::{Command, Outcome, SetGroup, SetQuota};

    #[test]
    fn lists_continue_after_a_key_even_if_it_was_removed() {
        let mut bench = LedgerFixture::new();
        for id in [1, 3, 5] {
            bench.step(step(id, &chain(&[('a', 4), (char::from(b'a' + id as u8), 2)]), 0, 1));
        }
        let ids = |after| bench.ledger.sessions_after(after).map(|found| found.id.0).collect::<Vec<_>>();
        assert_eq!((ids(None), ids(Some(session(1))), ids(Some(session(2)))), (vec![1, 3, 5], vec![3, 5], vec![3, 5]));
        assert_eq!(ids(Some(session(5))), [0u128; 0]);
        let workers = |after| bench.ledger.workers_after(after).count();
        assert_eq!((workers(None), workers(Some(WorkerId(1))), workers(Some(WorkerId(3)))), (3, 2, 0));
        let all: Vec<_> = bench.ledger.artifacts_after(None).map(|it| it.id).collect();
        let rest: Vec<_> = bench.ledger.artifacts_after(Some(all[0])).map(|it| it.id).collect();
        assert_eq!(rest, all[1..]);
    }

    #[test]
    fn a_tenant_with_entries_or_a_quota_is_listed_once() {
        let mut bench = LedgerFixture::new();
        bench.step(step(1, &chain(&[('a', 4)]), 0, 1));
        assert_eq!(bench.run(Command::RaiseLevel(2)), Outcome::Done);
        for name in ["default", "other"] {
            let set = SetQuota { tenant: TenantId(name.into()), artifacts: Some(9) };
            assert_eq!(bench.run(Command::SetQuota(set)), Outcome::Done);
        }
        let tenants = |after: Option<&str>| {
            let after = after.map(|name| TenantId(name.into()));
            bench.ledger.tenants_after(after).map(|tenant| tenant.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(
            (tenants(None), tenants(Some("default"))),
            (vec!["default".into(), "other".into()], vec!["other".into()])
        );
    }

    #[test]
    fn every_group_is_listed_once() {
        let mut bench = LedgerFixture::new();
        let artifacts = [1, 2, 3].map(|id| {
            bench.step(step(id, &chain(&[(char::from(b'a' + id as u8), 4)]), 0, 1));
            bench.head_artifact(session(id)).id
        });
        for (artifact, group) in artifacts.into_iter().zip([7, 9, 7]) {
            let set = SetGroup { artifact, group: Some(ArtifactGroupId(group)) };
            assert_eq!(bench.run(Command::SetGroup(set)), Outcome::Done);
        }
        let groups = |after| bench.ledger.groups_after(after).map(|group| group.0).collect::<Vec<_>>();
        assert_eq!((groups(None), groups(Some(ArtifactGroupId(7)))), (vec![7, 9], vec![9]));
    }
}
