//! What the user names on mizzen's own command line. Runs as the user on the host.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use mizzen_core::config::{ImagePolicy, ImportWhen};
use mizzen_core::environment::Environment;
use mizzen_core::find_image::{BareNames, ImageFinder};
use mizzen_core::request::ImageSource;
use mizzen_core::{Config, Digest, Failure, Reference};

use crate::environment;
use crate::importer::ChildImporter;

/// What the user names: a file in the current directory or the site's folders, or an image in a registry, which is imported. The
/// site's policy says what may be run.
pub fn to_run(name: &Path, config: &Config) -> Result<ImageSource, Failure> {
    find(name, config, &config.policy)
}

/// The image of an environment file; where that names it is in messages.
pub fn of_environment(file: &Environment, config: &Config) -> Result<ImageSource, Failure> {
    let (place, image) = file.image.as_ref().ok_or_else(|| environment::no_image(file))?;
    to_run(Path::new(OsStr::from_bytes(image)), config).map_err(|failure| failure.about(place))
}

/// The same for what is not to be run: its path, and the content that it must have; the image in a registry that it is.
pub fn to_read(
    name: &Path,
    config: &Config,
) -> Result<(PathBuf, Option<Digest>, Option<Reference>), Failure> {
    Ok(match find(name, config, &config.policy.of_registries())? {
        ImageSource::File { path, digest } => (path, digest, None),
        ImageSource::Stored { path, reference } => (path, None, Some(reference)),
        ImageSource::Unfetched(reference) => return Err(Failure::new(format!("{reference}: not imported"))),
        ImageSource::Recorded => return Err(Failure::new("no image")),
    })
}

fn find(name: &Path, config: &Config, policy: &ImagePolicy) -> Result<ImageSource, Failure> {
    let directory = std::env::current_dir().unwrap_or_else(|_| "/".into());
    // By hand there is no other node to do it.
    let import = match config.import {
        ImportWhen::Node => ImportWhen::Submit,
        when => when,
    };
    let importer = &mut ChildImporter { image_store: &config.image_store };
    // What is typed here is no script for pyxis.
    let bare_names = BareNames::File;
    let mut finder = ImageFinder { directory: &directory, config, policy, bare_names, import, importer };
    finder.find(name.as_os_str().as_encoded_bytes())
}
