//! Record of an executed nemesis.

use crate::check::GuaranteeViolation;
use crate::history::RunInstant;
use crate::testbed::TrialEnvironment;

/// Note of a trial without clock and fdatasync faults.
pub(super) const NO_SYSCALL_FAULTS: &str =
    "needs a C compiler (`cc`), to put a library between nodes and their disks and clocks";

/// Record of an executed nemesis.
#[derive(Clone, Debug)]
pub(crate) struct NemesisRecord {
    /// Number of injected faults.
    pub(crate) faults: u32,
    /// Start of the first fault.
    pub(crate) began: RunInstant,
    /// End of the last fault.
    pub(crate) healed: RunInstant,
    /// Times at which a leader was lost.
    pub(crate) leader_lost: Vec<RunInstant>,
    /// Violations found by the nemesis itself, in addition to the checks after every nemesis.
    pub(crate) broken: Vec<GuaranteeViolation>,
    /// Note for the results table.
    pub(crate) note: String,
}

impl NemesisRecord {
    /// Starts a record now.
    pub(super) fn begin(environment: &TrialEnvironment) -> NemesisRecord {
        let now = environment.history.now();
        NemesisRecord {
            faults: 0,
            began: now,
            healed: now,
            leader_lost: Vec::new(),
            broken: Vec::new(),
            note: String::new(),
        }
    }

    /// Counts a fault.
    pub(super) fn count_fault(&mut self) {
        self.faults += 1;
    }

    /// Counts a fault that takes the leader away.
    pub(super) fn count_leader_loss(&mut self, environment: &TrialEnvironment) {
        self.faults += 1;
        self.leader_lost.push(environment.history.now());
    }

    /// Marks the nemesis as not run, for this reason.
    pub(super) fn not_run(mut self, why: &str) -> NemesisRecord {
        self.note = why.to_owned();
        self
    }

    /// Ends the record now.
    pub(super) fn end(mut self, environment: &TrialEnvironment) -> NemesisRecord {
        self.healed = environment.history.now();
        self
    }
}
