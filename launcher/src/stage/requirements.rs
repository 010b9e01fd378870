//! What an image must be to be used: what the user asks for by its digest, and what the site's policy allows. Looked at on the
//! node, on the file that is open. Runs as the user on the host.

use mizzen_core::config::ImagePolicy;
use mizzen_core::request::ImageSource;
use mizzen_core::{Digest, Failure};

use super::StageError;
use crate::image::{ImageKind, OpenedImage};

/// Conditions on an image; by default there are none.
#[derive(Clone, Debug, Default)]
pub struct Requirements {
    /// The only content that it may have.
    pin: Option<Digest>,
    /// The site's rules.
    policy: ImagePolicy,
}

impl Requirements {
    /// For the image of a container.
    pub fn new(image: &ImageSource, policy: &ImagePolicy) -> Requirements {
        match image {
            ImageSource::File { digest, .. } => Requirements { pin: *digest, policy: policy.clone() },
            ImageSource::Stored { .. } | ImageSource::Unfetched(_) | ImageSource::Recorded => {
                Requirements { pin: None, policy: policy.of_stored_file() }
            }
        }
    }

    /// For a file that is not run.
    pub fn pinned(pin: Option<Digest>) -> Requirements {
        Requirements { pin, policy: ImagePolicy::default() }
    }

    /// Whether its content has to be known.
    pub fn content_matters(&self) -> bool {
        self.pin.is_some() || self.policy.digests.is_some()
    }

    /// What can be seen of the image where the user has it. A copy of it belongs to another, in another folder.
    pub(super) fn check_source(&self, opened: &OpenedImage) -> Result<(), StageError> {
        if opened.kind == ImageKind::Directory && self.pin.is_some() {
            return Err(StageError::Refused(Failure::new("a directory has no digest")));
        }
        self.policy.check_file(&opened.file).map_err(StageError::Refused)
    }

    /// Its content.
    pub(super) fn check_content(&self, found: Digest) -> Result<(), StageError> {
        if let Some(pin) = self.pin.filter(|pin| *pin != found) {
            let failure = Failure::new(format!("its content is {found}, not {pin}"));
            return Err(StageError::Refused(
                failure.hint("it is another image than the one that was asked for by its digest"),
            ));
        }
        self.policy.check_digest(found).map_err(StageError::Refused)
    }
}
