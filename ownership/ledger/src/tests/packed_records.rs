//! Packed artifacts and sessions, and interned values, survive a round trip.

use std::sync::Arc;

use proptest::prelude::*;
use vocabulary::{ArtifactGroupId, ArtifactId};

use super::*;
use crate::artifact_table::{ArtifactTable, PackedArtifact};
use crate::boundary_index::BoundaryIndex;
use crate::origin_interner::ChainDescriptorInterner;
use crate::session_table::SessionTable;

fn epochs() -> impl Strategy<Value = Epoch> {
    let index = prop_oneof![0..300u64, Just(u64::MAX)];
    (0..3u32, index, 0..3u32).prop_map(|(generation, index, position)| Epoch { generation, index, position })
}

fn owners() -> impl Strategy<Value = Owner> {
    (any::<u64>(), any::<u64>(), any::<u16>()).prop_map(|(worker, incarnation, rank)| Owner {
        worker: WorkerId(worker),
        incarnation: Incarnation(incarnation),
        rank: DpRank(rank),
    })
}

fn points() -> impl Strategy<Value = PrefixPoint> {
    (0..1u64 << 40, any::<u128>()).prop_map(|(blocks, id)| PrefixPoint { blocks: Blocks(blocks), id: PrefixId(id) })
}

/// Generates boundaries in ascending order.
fn boundaries() -> impl Strategy<Value = Vec<(u64, u128, Epoch)>> {
    prop::collection::vec((1..200u64, any::<u128>(), epochs()), 0..12)
}

fn replicas() -> impl Strategy<Value = Vec<Replica>> {
    let copy = (owners(), points(), any::<u64>());
    prop::collection::vec(copy, 0..4).prop_map(|copies| {
        let replica = |(holder, upto, expires)| Replica { holder, upto, expires: LedgerTime(expires) };
        copies.into_iter().map(replica).collect()
    })
}

fn origin() -> Arc<ChainDescriptor> {
    Arc::new(ChainDescriptor { tenant: tenant(), model: ModelId::from("tiny"), root: PrefixId(9), shape: shape() })
}

prop_compose! {
    fn artifacts()(
        id in any::<u128>(),
        parent in prop::option::of((any::<u128>(), points())),
        kept in boundaries(),
        (owner, epoch) in (prop::option::of(owners()), epochs()),
        (sessions, children) in (prop::collection::vec(any::<u128>(), 0..14), prop::collection::vec(any::<u128>(), 0..14)),
        replicas in replicas(),
        (group, touched, pinned) in (prop::option::of(any::<u128>()), any::<u64>(), any::<bool>()),
    ) -> Artifact {
        let parent = parent.map(|(artifact, at)| ParentPoint { artifact: ArtifactId(artifact), at });
        let mut blocks = parent.map_or(Blocks::ZERO, |parent| parent.at.blocks);
        let boundaries = kept.into_iter().map(|(step, id, epoch)| {
            blocks += Blocks(step);
            PrefixBoundary { point: PrefixPoint { blocks, id: PrefixId(id) }, epoch }
        });
        let pinned = if pinned { ArtifactPinFlag::Yes } else { ArtifactPinFlag::No };
        Artifact {
            id: ArtifactId(id),
            origin: origin(),
            parent,
            boundaries: boundaries.collect(),
            owner,
            epoch,
            sessions: sessions.into_iter().map(SessionId).collect(),
            children: children.into_iter().map(ArtifactId).collect(),
            replicas,
            group: group.map(ArtifactGroupId),
            touched: LedgerTime(touched),
            pinned,
        }
    }
}

prop_compose! {
    fn sessions()(
        id in any::<u128>(),
        names in (0..3u8, 0..3u8),
        heads in prop::collection::vec((points(), any::<u128>(), any::<u64>(), any::<u64>()), 0..5),
        (owner, parent, epoch) in (prop::option::of(owners()), prop::option::of(any::<u128>()), epochs()),
        (opened, touched) in (any::<u64>(), any::<u64>()),
    ) -> Session {
        let head = |(point, artifact, format, touched)| {
            let scope = Scope::of(&tenant(), KvFormatDigest(format));
            SessionHead { point, artifact: ArtifactId(artifact), scope, touched: LedgerTime(touched) }
        };
        Session {
            id: SessionId(id),
            tenant: TenantId(format!("tenant {}", names.0).into()),
            model: ModelId::from(format!("model {}", names.1).as_str()),
            parent: parent.map(SessionId),
            heads: heads.into_iter().map(head).collect(),
            owner,
            epoch,
            opened: LedgerTime(opened),
            touched: LedgerTime(touched),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_packed_artifact_unpacks_to_itself(artifact in artifacts(), other in any::<u128>()) {
        let stored = PackedArtifact::pack(&artifact);
        prop_assert_eq!(&stored.unpack(artifact.id), &artifact);
        for prefix in artifact.boundaries.iter().map(|boundary| boundary.point.id).chain([PrefixId(other)]) {
            let point = artifact.boundaries.iter().map(|boundary| boundary.point).find(|point| point.id == prefix);
            let kept = stored.boundary(artifact.id, prefix);
            prop_assert_eq!(kept.map(|kept| kept.point), point);
            if let Some(kept) = kept {
                prop_assert_eq!((kept.id, kept.owner, kept.epoch), (artifact.id, artifact.owner, artifact.epoch));
                prop_assert_eq!(kept.has_children(), !artifact.children.is_empty());
                prop_assert_eq!(kept.artifact(), artifact.clone());
            }
        }
    }

    #[test]
    fn the_session_table_and_its_encoding_round_trip(all in prop::collection::vec(sessions(), 0..20)) {
        let table: SessionTable = all.iter().cloned().collect();
        let plain: std::collections::BTreeMap<_, _> = all.iter().map(|session| (session.id, session.clone())).collect();
        prop_assert!(table.iter().eq(plain.values().cloned()));
        let bytes = rmp_serde::to_vec(&table).unwrap();
        prop_assert_eq!(&bytes, &rmp_serde::to_vec(&plain).unwrap(), "as plain records would be");
        let mut read: SessionTable = rmp_serde::from_slice(&bytes).unwrap();
        prop_assert_eq!((&read, read.digest), (&table, table.digest));
        for session in &all {
            prop_assert_eq!(read.get(session.id), plain.get(&session.id).cloned());
        }
        for id in plain.keys() {
            prop_assert_eq!(read.remove(*id), plain.get(id).cloned());
        }
        prop_assert_eq!((read.len(), read.digest), (0, 0));
    }

    #[test]
    fn the_artifact_table_encoding_round_trips(all in prop::collection::vec(artifacts(), 0..20)) {
        let table: ArtifactTable = all.iter().cloned().collect();
        let bytes = rmp_serde::to_vec(&table).unwrap();
        let read: ArtifactTable = rmp_serde::from_slice(&bytes).unwrap();
        prop_assert_eq!(&read, &table);
        prop_assert_eq!(rmp_serde::to_vec(&read).unwrap(), bytes);
        let ids: Vec<_> = read.iter().map(|artifact| artifact.id).collect();
        prop_assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
        for artifact in &all {
            prop_assert_eq!(table.origin(artifact.id), Some(&artifact.origin));
        }
    }

    #[test]
    fn an_artifact_is_encoded_as_a_plain_record(artifact in artifacts()) {
        // Bytes of the table itself: one entry, its id, then the record.
        let table: ArtifactTable = [artifact.clone()].into_iter().collect();
        let plain = std::collections::BTreeMap::from([(artifact.id, artifact)]);
        prop_assert_eq!(rmp_serde::to_vec(&table).unwrap(), rmp_serde::to_vec(&plain).unwrap());
    }
}

/// Artifacts whose ids share the upper half cannot be told apart by the index alone.
#[test]
fn a_boundary_lookup_compares_the_full_prefix_id() {
    let twin = |low: u128, kept: u128| {
        let point = PrefixPoint { blocks: Blocks(64), id: PrefixId(kept) };
        let boundaries = vec![PrefixBoundary { point, epoch: Epoch::default() }];
        Artifact { boundaries, ..Artifact::empty(ArtifactId(7 << 64 | low), origin()) }
    };
    // The ids of artifacts and prefixes share their upper halves.
    let twins = [twin(1, 5 << 64 | 1), twin(2, 5 << 64 | 2), twin(3, 5 << 64 | 3)];
    let table: ArtifactTable = twins.iter().cloned().collect();
    let mut index = BoundaryIndex::default();
    for artifact in &twins {
        index.insert(artifact.boundaries[0].point.id, scope(), artifact.id);
    }
    for artifact in &twins {
        assert_eq!(
            index.find(artifact.boundaries[0].point.id, scope(), &table).map(|found| found.id),
            Some(artifact.id)
        );
    }
    assert!(index.find(PrefixId(5 << 64 | 4), scope(), &table).is_none());
    let elsewhere = Scope::of(&TenantId("other".into()), KvFormatDigest(0));
    assert!(index.find(PrefixId(5 << 64 | 1), elsewhere, &table).is_none(), "nothing is looked up across tenants");
}

#[test]
fn equal_origins_are_interned_and_released_with_their_last_artifact() {
    let mut interned = ChainDescriptorInterner::default();
    let (mut first, mut second) = (origin(), origin());
    interned.intern(&mut first);
    interned.intern(&mut second);
    assert!(Arc::ptr_eq(&first, &second));
    let different = ChainDescriptor { shape: KvBlockSpec { block_bytes: Bytes(1), ..shape() }, ..(*first).clone() };
    let mut third = Arc::new(different);
    interned.intern(&mut third);
    assert!(!Arc::ptr_eq(&first, &third), "the same root and scope, but other blocks");
    interned.release(&third);
    interned.release(&first);
    let mut fourth = origin();
    interned.intern(&mut fourth);
    assert!(Arc::ptr_eq(&fourth, &second), "somebody still holds it");
    interned.release(&second);
    interned.release(&fourth);
    let mut fifth = origin();
    interned.intern(&mut fifth);
    assert!(!Arc::ptr_eq(&fifth, &second), "nobody held it any more");
}

#[test]
fn sessions_of_one_tenant_and_model_share_their_names() {
    let mut bench = LedgerFixture::new();
    for id in 1..=2 {
        bench.step(step(id, &chain(&[('a', 30 + id as u64)]), 0, 1));
    }
    let names = |id| {
        let session = bench.session(session(id));
        (session.tenant.0, session.model.0)
    };
    let ((tenant, model), (other_tenant, other_model)) = (names(1), names(2));
    assert!(Arc::ptr_eq(&tenant, &other_tenant) && Arc::ptr_eq(&model, &other_model));
}

#[test]
fn an_artifact_with_very_many_references_round_trips() {
    let mut bench = LedgerFixture::new();
    for id in 0..200 {
        bench.step(step(id, &chain(&[('a', 64), ((b'b' + (id % 20) as u8) as char, 1 + id as u64)]), 0, 1));
    }
    let shared = bench.ledger.artifacts().find(|artifact| artifact.parent.is_none()).unwrap();
    assert!(shared.children.len() > 10, "{}", shared.children.len());
    let bytes = rmp_serde::to_vec(&bench.ledger).unwrap();
    let read: Ledger = rmp_serde::from_slice(&bytes).unwrap();
    assert_eq!(read.artifact(shared.id), Some(shared));
    for id in 0..200 {
        bench.run(Command::CloseSession(session(id)));
    }
    assert!(bench.ledger.artifacts().all(|artifact| artifact.sessions.is_empty()));
}
