//! What this router shows the other ones, and whom it lets in: read anew when the files of `[cluster.tls]` change.

use std::sync::Arc;
use std::time::Duration;

use ownership::TlsFiles;

use crate::config::Config;
use crate::following::{Stamp, follow, stamp};
use crate::gateway::Gateway;

/// The files, as they were before the directory read them.
#[derive(Clone)]
pub(crate) struct Certificates {
    files: TlsFiles,
    seen: [Option<Stamp>; 3],
}

impl Certificates {
    /// Looks at the files; none where connections between routers are plain. To be called before the directory is opened.
    pub(crate) fn look(config: &Config) -> Option<Self> {
        let files = config.cluster.peering().tls?;
        let seen = stamps(&files);
        Some(Self { files, seen })
    }

    /// Has the directory read the files anew whenever they change. What cannot be used, or would be refused by the others, is
    /// said, and what was read before stays.
    pub(crate) async fn follow(self, gateway: Arc<Gateway>, every: Duration) {
        let followed = gateway.followed("cluster_certificates");
        let Self { files, seen } = self;
        let take = || {
            gateway.directory().reread_certificates()?;
            tracing::info!(certificate = %files.certificate.display(), "the cluster's certificates were read anew");
            Ok::<_, ownership::OwnershipError>(())
        };
        follow((seen, || stamps(&files)), (every, &followed), take).await;
    }
}

fn stamps(files: &TlsFiles) -> [Option<Stamp>; 3] {
    [stamp(&files.ca), stamp(&files.certificate), stamp(&files.key)]
}
