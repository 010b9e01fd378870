//! Which file a container is saved as, and whether it can be. Runs as the user on the host.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use mizzen_core::Failure;
use mizzen_core::settings::{Key, SavePath, Writable};

use crate::image::shown;
use crate::importer;
use crate::options::RunOptions;
use crate::sandbox::SaveTarget;

/// The file that the container is to be saved as, if it is. `node` is this node's name where the step has others.
pub fn save_target(options: &RunOptions, node: Option<&str>) -> Result<Option<SaveTarget>, Failure> {
    let Some(SavePath(path)) = &options.settings.save else { return Ok(None) };
    let about = |failure: Failure| failure.about(options.user().name_of(Key::Save));
    if options.settings.writable == Some(Writable::No) {
        return Err(about(Failure::new("nothing can change in a container that is read-only"))
            .hint("leave --container-readonly out"));
    }
    if options.unshare.pid {
        return Err(about(Failure::new("a container with process ids of its own cannot be saved"))
            .hint("leave --unshare pid out"));
    }
    let text = path.as_os_str().as_bytes();
    let placeholder = text.windows(2).position(|part| part == b"%N");
    let path = match (placeholder, node) {
        (Some(at), _) => {
            let name = mizzen_core::node_name();
            PathBuf::from(OsString::from_vec([&text[..at], name.as_bytes(), &text[at + 2..]].concat()))
        }
        (None, Some(_)) => {
            let message = format!("{}: every node of the step would write it", shown(path));
            return Err(about(Failure::new(message)).hint("write %N into its name, for the name of the node"));
        }
        (None, None) => path.clone(),
    };
    let path = std::path::absolute(&path).unwrap_or(path);
    SaveTarget::open(&path, &importer::find()?).map(Some).map_err(about)
}
