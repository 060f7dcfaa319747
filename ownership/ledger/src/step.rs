//! One finished step as one command.

use vocabulary::{Blocks, Chain, Epoch, ModelId, NodeId, Owner, PrefixId, SessionId, TenantId};

use crate::artifact::{KvShape, Origin};
use crate::command::{Advance, ClaimOwner, Command, Migrate, OpenSession, Place, Seal, Subject};
use crate::outcome::{Movement, Outcome, Refusal};
use crate::{Point, Run};

/// What a step does to the session's decode ownership.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Custody {
    /// Nothing: it was served read-only beside the owner. Its new blocks still belong to who computed them.
    Stays,
    /// The server takes it unless somebody live has it.
    Claims,
    /// It moves to the server, with the extents that only this session references.
    Moves {
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
    pub chain: &'a Chain,
    /// How many of its blocks lie at `owner` for good.
    pub sealed: Blocks,
    /// The deepest block of the chain that the ledger knew (`Located::known`); 0 always works and costs more log.
    pub base: Blocks,
    /// The head whose history the client rewrote (`Located::rewrites`).
    pub replaces: Option<PrefixId>,
    /// Who served it and has the blocks.
    pub owner: Owner,
    /// What becomes of the decode ownership.
    pub custody: Custody,
    /// What the blocks are made of.
    pub shape: KvShape,
    /// The router that ran it; withdraws its intent on the base.
    pub router: NodeId,
}

impl Command {
    /// Opens the session if need be, moves or claims it, seals the new blocks and advances the head.
    ///
    /// `None` when the step sealed no block, or `sealed` lies beyond the chain: then there is nothing to say.
    /// Should the answer be `StepOutcome::must_restart`, send it again with `base: Blocks(0)`.
    pub fn commit_step(step: StepCommit<'_>) -> Option<Command> {
        let run = Run::of(step.chain, step.base.min(Blocks(step.sealed.0.checked_sub(1)?)), step.sealed)?;
        let origin =
            Origin { tenant: step.tenant.clone(), model: step.model.clone(), root: step.chain.root, shape: step.shape };
        let head = Place { scope: origin.scope(), point: run.end(), extent: None };
        let base = Point::on(step.chain, step.base).map(|base| base.id);
        let mut batch = vec![Command::OpenSession(OpenSession {
            session: step.session,
            tenant: step.tenant.clone(),
            model: step.model.clone(),
            parent: step.parent,
        })];
        if let Custody::Moves { seen } = step.custody {
            batch.push(Command::Migrate(Migrate { session: step.session, to: step.owner, head: base, seen }));
        }
        let owner = step.owner;
        batch.push(Command::Seal(Seal { session: Some(step.session), origin, run, extent: None, owner }));
        let (session, replaces) = (step.session, step.replaces);
        let intent = base.map(|base| (base, step.router));
        batch.push(Command::Advance(Advance { session, head, replaces, intent }));
        if step.custody == Custody::Claims {
            batch.push(Command::ClaimOwner(ClaimOwner { subject: Subject::Session(session), owner }));
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
    pub movement: Option<Movement>,
    /// The server's grant of the session, where it took it.
    pub granted: Option<Epoch>,
    /// The base is no longer kept: commit again from block 0.
    pub must_restart: bool,
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
        step.must_restart = base_lost && !step.sealed && !parts.iter().any(hopeless);
        step
    }
}
