//! Certificates between routers: reloaded when the files of `[cluster.tls]` change.

use std::sync::Arc;
use std::time::Duration;

use ownership::TlsFiles;

use crate::app_state::AppState;
use crate::config::Config;
use proxy::watched_files::{FileStamp, follow, stamp_of};

/// The certificate files, with their stamps before the directory read them.
#[derive(Clone)]
pub(crate) struct CertificateFiles {
    files: TlsFiles,
    stamps: [Option<FileStamp>; 3],
}

impl CertificateFiles {
    /// Takes the files' stamps; `None` where connections between routers are not encrypted. Must be called before the
    /// directory is opened.
    pub(crate) fn stat(config: &Config) -> Option<Self> {
        let files = config.cluster.peering().tls?;
        let seen = stamps(&files);
        Some(Self { files, stamps: seen })
    }

    /// Reloads the files whenever they change. Files that cannot be used, or that the peers would refuse, are logged,
    /// and the previous certificates stay in use.
    pub(crate) async fn follow(self, app_state: Arc<AppState>, every: Duration) {
        let followed = app_state.watched_files("cluster_certificates");
        let Self { files, stamps: seen } = self;
        let take = || {
            app_state.directory().reload_certificates()?;
            tracing::info!(certificate = %files.certificate.display(), "the cluster's certificates were read anew");
            Ok::<_, ownership::LedgerNodeError>(())
        };
        follow((seen, || stamps(&files)), (every, &followed), take).await;
    }
}

fn stamps(files: &TlsFiles) -> [Option<FileStamp>; 3] {
    [stamp_of(&files.ca), stamp_of(&files.certificate), stamp_of(&files.key)]
}
