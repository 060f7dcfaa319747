//! A repeated client serial returns the first outcome and is not executed again.

use std::collections::BTreeMap;

use ledger::{Outcome, Refusal, Submission};
use vocabulary::{ClientId, ClientSerial};

use crate::ensure;
use crate::property::PropertyViolation;

const CHECK: &str = "a replayed serial returns the first outcome";

#[derive(Debug, Default)]
pub(crate) struct ExactlyOnceCheck(BTreeMap<(ClientId, ClientSerial), Outcome>);

impl ExactlyOnceCheck {
    pub(crate) fn on_applied(&mut self, submission: &Submission, outcome: &Outcome) -> Result<bool, PropertyViolation> {
        let key = (submission.client, submission.serial);
        // Nothing is executed before a client opens, so no outcome is remembered.
        let unopened = matches!(outcome, Outcome::Refused(Refusal::UnknownClient));
        match self.0.get(&key) {
            Some(first) => {
                ensure!(first == outcome, CHECK, "{:?} of {}: {first:?}, then {outcome:?}", key.1, key.0)?;
                Ok(true)
            }
            None if unopened => Ok(false),
            None => {
                self.0.insert(key, outcome.clone());
                Ok(false)
            }
        }
    }
}
