//! Commit of a finished step as one command.

use vocabulary::{Blocks, Epoch, ModelId, NodeId, Owner, PrefixChain, PrefixId, SessionId, TenantId};

use crate::artifact::{ChainDescriptor, KvBlockSpec};
use crate::command::{
    AdvanceHead, ClaimOwner, Command, MigrateSession, OpenSession, OwnershipSubject, PrefixRef, SealBlocks,
};
use crate::outcome::{HeadMovement, Outcome, Refusal};
use crate::{ChainSegment, PrefixPoint};

/// Effect of a step on the session's decode ownership.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnershipTransition {
    /// None: the step was served read-only by a worker other than the owner. New blocks still belong to the worker that
    /// computed them.
    Unchanged,
    /// The serving worker claims the session unless it has a live owner.
    Claim,
    /// The session moves to the serving worker, with the artifacts that only this session references.
    Migrate {
        /// Epoch of the session when this was decided.
        seen: Epoch,
    },
}

/// What a router knows after the last byte of a step.
#[derive(Clone, Debug)]
pub struct StepCommit<'a> {
    /// Session.
    pub session: SessionId,
    /// Tenant.
    pub tenant: &'a TenantId,
    /// Model.
    pub model: &'a ModelId,
    /// Session that a new session was forked from.
    pub parent: Option<SessionId>,
    /// Block hashes of prompt and answer.
    pub chain: &'a PrefixChain,
    /// Number of leading blocks that `owner` has sealed.
    pub sealed: Blocks,
    /// Deepest block of the chain that the ledger knew (`LocateResult::known_blocks`). 0 always works but makes the log
    /// entry larger.
    pub base: Blocks,
    /// Head whose history the client rewrote (`LocateResult::replaced_head`).
    pub replaced_head: Option<PrefixId>,
    /// Rank that served the step and has the blocks.
    pub owner: Owner,
    /// Effect on the decode ownership.
    pub ownership: OwnershipTransition,
    /// Format and size of the blocks.
    pub shape: KvBlockSpec,
    /// Router that ran the step; its intent on the base is withdrawn.
    pub router: NodeId,
}

impl Command {
    /// Builds a command that opens the session if necessary, moves or claims it, seals the new blocks and advances the
    /// head.
    ///
    /// Returns `None` if the step sealed no block, or if `sealed` lies beyond the chain: then there is nothing to
    /// commit. If the outcome has `StepCommitOutcome::restart_from_root` set, send the command again with
    /// `base: Blocks(0)`.
    pub fn commit_step(step: StepCommit<'_>) -> Option<Command> {
        let run = ChainSegment::of(step.chain, step.base.min(Blocks(step.sealed.0.checked_sub(1)?)), step.sealed)?;
        let origin = ChainDescriptor {
            tenant: step.tenant.clone(),
            model: step.model.clone(),
            root: step.chain.root,
            shape: step.shape,
        };
        let head = PrefixRef { scope: origin.scope(), point: run.end(), extent: None };
        let base = PrefixPoint::on_chain(step.chain, step.base).map(|base| base.id);
        let mut batch = vec![Command::OpenSession(OpenSession {
            session: step.session,
            tenant: step.tenant.clone(),
            model: step.model.clone(),
            parent: step.parent,
        })];
        if let OwnershipTransition::Migrate { seen } = step.ownership {
            batch.push(Command::Migrate(MigrateSession { session: step.session, to: step.owner, head: base, seen }));
        }
        let owner = step.owner;
        batch.push(Command::Seal(SealBlocks { session: Some(step.session), origin, run, extent: None, owner }));
        let (session, replaces) = (step.session, step.replaced_head);
        let intent = base.map(|base| (base, step.router));
        batch.push(Command::Advance(AdvanceHead { session, head, replaces, intent }));
        if step.ownership == OwnershipTransition::Claim {
            batch.push(Command::ClaimOwner(ClaimOwner { subject: OwnershipSubject::Session(session), owner }));
        }
        Some(Command::Batch(batch))
    }
}

/// Outcome of a `Command::commit_step`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepCommitOutcome {
    /// Whether the blocks are sealed.
    pub sealed: bool,
    /// How the session's heads changed.
    pub movement: Option<HeadMovement>,
    /// Epoch of the session's grant, if the serving worker took it.
    pub granted: Option<Epoch>,
    /// The base is no longer kept: commit again from block 0.
    pub restart_from_root: bool,
}

impl StepCommitOutcome {
    /// Interprets the outcome of a `Command::commit_step`.
    pub fn of(outcome: &Outcome) -> Self {
        let mut step = Self::default();
        let Outcome::Batch(parts) = outcome else { return step };
        let mut base_lost = false;
        for part in parts {
            match part {
                Outcome::Sealed { .. } => step.sealed = true,
                Outcome::Advanced { movement } => step.movement = Some(*movement),
                Outcome::Granted { epoch } => step.granted = Some(*epoch),
                Outcome::Merged { .. } | Outcome::Refused(Refusal::UnknownPrefix) => base_lost = true,
                _ => {}
            }
        }
        // If another refusal prevented the seal, the advance finds no prefix either; that is no reason to retry.
        let hopeless = |p: &Outcome| matches!(p, Outcome::Refused(refusal) if *refusal != Refusal::UnknownPrefix);
        step.restart_from_root = base_lost && !step.sealed && !parts.iter().any(hopeless);
        step
    }
}
