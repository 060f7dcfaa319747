//! One finished step as one command.

use vocabulary::{Blocks, Epoch, ModelId, NodeId, Owner, PrefixChain, PrefixId, SessionId, TenantId};

use crate::artifact::{KvOrigin, KvShape};
use crate::command::{
    AdvanceHead, ClaimOwner, Command, MigrateSession, OpenSession, OwnershipSubject, PrefixRef, SealBlocks,
};
use crate::outcome::{HeadMovement, Outcome, Refusal};
use crate::{ChainSegment, PrefixPoint};

/// What a step does to the session's decode ownership.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnershipTransition {
    /// Nothing: it was served read-only beside the owner. Its new blocks still belong to who computed them.
    Unchanged,
    /// The server takes it unless somebody live has it.
    Claim,
    /// It moves to the server, with the extents that only this session references.
    Migrate {
        /// The session's epoch when this was decided.
        seen: Epoch,
    },
}

/// What a router knows after the last byte of a step.
#[derive(Clone, Debug)]
pub struct StepCommit<'a> {
    /// The session.
    pub session: SessionId,
    /// Whose it is.
    pub tenant: &'a TenantId,
    /// With which model.
    pub model: &'a ModelId,
    /// What it was forked from, for a new session.
    pub parent: Option<SessionId>,
    /// Prompt and answer.
    pub chain: &'a PrefixChain,
    /// How many of its blocks lie at `owner` for good.
    pub sealed: Blocks,
    /// The deepest block of the chain that the ledger knew (`Located::known`); 0 always works and costs more log.
    pub base: Blocks,
    /// The head whose history the client rewrote (`Located::rewrites`).
    pub replaced_head: Option<PrefixId>,
    /// Who served it and has the blocks.
    pub owner: Owner,
    /// What becomes of the decode ownership.
    pub ownership: OwnershipTransition,
    /// What the blocks are made of.
    pub shape: KvShape,
    /// The router that ran it; withdraws its intent on the base.
    pub router: NodeId,
}

impl Command {
    /// Opens the session if need be, moves or claims it, seals the new blocks and advances the head.
    ///
    /// `None` when the step sealed no block, or `sealed` lies beyond the chain: then there is nothing to say.
    /// Should the answer be `StepOutcome::restart_from_root`, send it again with `base: Blocks(0)`.
    pub fn commit_step(step: StepCommit<'_>) -> Option<Command> {
        let run = ChainSegment::of(step.chain, step.base.min(Blocks(step.sealed.0.checked_sub(1)?)), step.sealed)?;
        let origin = KvOrigin {
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

/// What became of a `Command::commit_step`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepOutcome {
    /// Whether the blocks are sealed.
    pub sealed: bool,
    /// How the head moved.
    pub movement: Option<HeadMovement>,
    /// The server's grant of the session, where it took it.
    pub granted: Option<Epoch>,
    /// The base is no longer kept: commit again from block 0.
    pub restart_from_root: bool,
}

impl StepOutcome {
    /// Reads the outcome of a `Command::commit_step`.
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
        // An advance to what another refusal kept from being sealed finds no prefix either; that is no reason to retry.
        let hopeless = |p: &Outcome| matches!(p, Outcome::Refused(refusal) if *refusal != Refusal::UnknownPrefix);
        step.restart_from_root = base_lost && !step.sealed && !parts.iter().any(hopeless);
        step
    }
}
