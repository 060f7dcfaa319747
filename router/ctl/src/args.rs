//! Argument types of the command line. All arguments are parsed before anything is sent.

use std::str::FromStr;

use clap::ValueEnum;
use vocabulary::{ArtifactId, Epoch, ParseIdError, SessionId, WorkerId};

use vocabulary::RoutingMode;
use vocabulary::WorkerUrl;

/// A worker, by its id or its URL.
#[derive(Clone, Copy, PartialEq, Eq, Debug, derive_more::Display)]
pub struct WorkerArg(pub WorkerId);

/// The text does not name a worker.
#[derive(Debug, thiserror::Error)]
#[error("accepted is its URL, or w- and 16 hexadecimal digits, as `ctl worker list` shows both")]
pub struct WorkerArgError;

impl FromStr for WorkerArg {
    type Err = WorkerArgError;

    fn from_str(text: &str) -> Result<Self, WorkerArgError> {
        let is_url = text.starts_with("http://") || text.starts_with("https://");
        if is_url {
            // The form used in lists and registrations, with a role suffix.
            let endpoint = text.parse::<WorkerUrl>().map_err(|_| WorkerArgError)?.endpoint;
            return Ok(Self(WorkerId::of_endpoint(&endpoint)));
        }
        text.parse().map(Self).map_err(|_| WorkerArgError)
    }
}

/// Something that can be owned: a session or an artifact. Displays as its API path.
#[derive(Clone, Copy, PartialEq, Eq, Debug, derive_more::Display)]
pub(crate) enum OwnershipSubjectArg {
    #[display("sessions/{_0}")]
    Session(SessionId),
    #[display("artifacts/{_0}")]
    Artifact(ArtifactId),
}

impl FromStr for OwnershipSubjectArg {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        if text.starts_with("a-") { text.parse().map(Self::Artifact) } else { text.parse().map(Self::Session) }
    }
}

/// An epoch, as tables and ETags show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EpochArg(pub(crate) Epoch);

/// The text is not an epoch.
#[derive(Debug, thiserror::Error)]
#[error("accepted is GENERATION.INDEX.POSITION, as lists show it")]
pub(crate) struct EpochArgError;

impl FromStr for EpochArg {
    type Err = EpochArgError;

    fn from_str(text: &str) -> Result<Self, EpochArgError> {
        let parts: Vec<&str> = text.split('.').collect();
        let [generation, index, position] = parts[..] else { return Err(EpochArgError) };
        let epoch = Epoch {
            generation: generation.parse().map_err(|_| EpochArgError)?,
            index: index.parse().map_err(|_| EpochArgError)?,
            position: position.parse().map_err(|_| EpochArgError)?,
        };
        Ok(Self(epoch))
    }
}

/// Who decides where steps go.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ModeArg {
    /// The planner.
    Active,
    /// The fallback policy; plans are made and recorded.
    Shadow,
    /// The fallback policy; nothing is planned.
    Bypass,
}

impl ModeArg {
    /// Returns the mode as the API writes it.
    pub(crate) fn routing_mode(self) -> RoutingMode {
        match self {
            Self::Active => RoutingMode::Active,
            Self::Shadow => RoutingMode::Shadow,
            Self::Bypass => RoutingMode::Bypass,
        }
    }
}

impl std::fmt::Display for ModeArg {
    /// Writes the API's word.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.routing_mode().as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_parse_as_lists_print_them() {
        assert_eq!("http://a:1/".parse::<WorkerArg>().unwrap().0, WorkerId::of_endpoint("http://a:1"));
        assert_eq!("http://a:1#decode".parse::<WorkerArg>().unwrap().0, WorkerId::of_endpoint("http://a:1"));
        assert_eq!("w-000000000000002a".parse::<WorkerArg>().unwrap().0, WorkerId(42));
        let (session, artifact) = (SessionId(1), ArtifactId(1));
        assert_eq!(session.to_string().parse::<OwnershipSubjectArg>().unwrap(), OwnershipSubjectArg::Session(session));
        assert_eq!(
            artifact.to_string().parse::<OwnershipSubjectArg>().unwrap().to_string(),
            format!("artifacts/{artifact}")
        );
        assert_eq!("1.2.3".parse::<EpochArg>().unwrap().0, Epoch { generation: 1, index: 2, position: 3 });
        for bad in ["", "w-", "a:1", "s-1", "http://a:1#decoder", "http://"] {
            assert!(bad.parse::<WorkerArg>().is_err(), "{bad}");
        }
        for bad in ["", "1.2", "1.2.3.4", "-1.2.3", "a.b.c"] {
            assert!(bad.parse::<EpochArg>().is_err(), "{bad}");
        }
        assert!("x-1".parse::<OwnershipSubjectArg>().is_err() && "a-".parse::<OwnershipSubjectArg>().is_err());
    }

    #[test]
    fn invalid_worker_error_names_the_accepted_forms_once() {
        let message = "w-nope".parse::<WorkerArg>().unwrap_err().to_string();
        assert_eq!(message.matches("accepted is").count(), 1, "{message}");
        assert!(message.contains("its URL") && message.contains("16 hexadecimal digits"), "{message}");
        assert!("s-1".parse::<OwnershipSubjectArg>().is_err() && "a-1".parse::<OwnershipSubjectArg>().is_err());
    }
}
