//! What this router shows the other ones, and whom it lets in: read anew when the files of `[cluster.tls]` change.

use std::sync::Arc;
use std::time::Duration;

use ownership::TlsFiles;

use crate::app_state::AppState;
use crate::config::Config;
use crate::watched_files::{FileStamp, follow, stamp_of};

/// The files, as they were before the directory read them.
#[derive(Clone)]
pub(crate) struct Certificates {
    files: TlsFiles,
    stamps: [Option<FileStamp>; 3],
}

impl Certificates {
    /// Looks at the files; none where connections between routers are plain. To be called before the directory is opened.
    pub(crate) fn stat(config: &Config) -> Option<Self> {
        let files = config.cluster.peering().tls?;
        let seen = stamps(&files);
        Some(Self { files, stamps: seen })
    }

    /// Has the directory read the files anew whenever they change. What cannot be used, or would be refused by the others, is
    /// said, and what was read before stays.
    pub(crate) async fn follow(self, gateway: Arc<AppState>, every: Duration) {
        let followed = gateway.watched_files("cluster_certificates");
        let Self { files, stamps: seen } = self;
        let take = || {
            gateway.directory().reload_certificates()?;
            tracing::info!(certificate = %files.certificate.display(), "the cluster's certificates were read anew");
            Ok::<_, ownership::OwnershipError>(())
        };
        follow((seen, || stamps(&files)), (every, &followed), take).await;
    }
}

fn stamps(files: &TlsFiles) -> [Option<FileStamp>; 3] {
    [stamp_of(&files.ca), stamp_of(&files.certificate), stamp_of(&files.key)]
}
