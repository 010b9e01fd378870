//! How a container is started, from parsed options to the running program. Read this file first. `mizzen run` does all of it; in
//! a Slurm step the first task on a node does it for the others (`step/mod.rs`), and under mpirun the first rank
//! (`share/mod.rs`).
//!
//!     options -> import -> stage -> load -> serve -> plan -> build -> exec
//!
//! | part   | what it gives                      | what it does to the node                                           |
//! |--------|------------------------------------|--------------------------------------------------------------------|
//! | import | the image's path                   | where the site wants that: imports it into the user's store        |
//! | stage  | the image's file                   | may copy the image to the node                                     |
//! | load   | the image's files, readable        | nothing                                                            |
//! | serve  | a file server, for a squashfs      | starts a process, which reads ahead while the rest is planned      |
//! | plan   | every mount, variable, name        | nothing: computed from plain facts; squashfs mounts are staged too |
//! | build  | namespaces with everything mounted | this process is inside from here on                                |
//! | exec   | the program                        | this process becomes it                                            |
//!
//! Runs as the user on the host, and from `build` on in the container's namespaces.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mizzen_core::image::real_path;
use mizzen_core::request::ImageSource;
use mizzen_core::settings::Verbosity;
use mizzen_core::{Failure, limits};
use mizzen_squashfs as squashfs;
use tracing::{debug, info_span};

use crate::host::Host;
use crate::image::{self, Content, Loaded};
use crate::mount::MountKind;
use crate::options::RunOptions;
use crate::plan::{self, Identity, Plan};
use crate::report::report_note;
use crate::sandbox::{self, Namespaces, Reporter, RootSource, Server, Sources, StderrReporter, Watch};
use crate::stage::{Requirements, StagedImage, StagingOptions, stage};
use crate::{host_libraries, importer, raised_limits, trace};

/// Runs a program in a container of its own: becomes it, or returns why not.
pub fn run(options: &RunOptions) -> Result<i32, Failure> {
    let prepared = prepare_run(options)?;
    if prepared.plan.unshare.pid {
        return sandbox::run_as_child(&prepared.plan, prepared.sources);
    }
    let (plan, _) = enter(options, prepared)?;
    Err(sandbox::exec_program(&plan.program))
}

/// Prepares the container of `mizzen run`, and tells what the user should know.
pub fn prepare_run(options: &RunOptions) -> Result<Prepared, Failure> {
    let reporter = Box::new(StderrReporter::for_this_process());
    let prepared = prepare(options, &Host::detect(), reporter)?;
    prepared.plan.notes.iter().for_each(|note| report_note(note));
    Ok(prepared)
}

/// Makes that container and enters it.
pub fn enter(options: &RunOptions, prepared: Prepared) -> Result<(Plan, Namespaces), Failure> {
    let Prepared { plan, sources } = prepared;
    let namespaces = build(&plan, sources, None)?;
    if options.settings.verbose() != Verbosity::Quiet {
        report_note(&summary(&plan));
    }
    if let Some(note) = sandbox::dangling_argument(&options.command) {
        report_note(&note);
    }
    Ok((plan, namespaces))
}

/// Everything but the side effects, for `mizzen plan`: the image is read where it is, and nothing is served.
pub fn plan(options: &RunOptions) -> Result<Plan, Failure> {
    let options = RunOptions { staging: StagingOptions::never(), ..options.clone() };
    let image = stage_and_load(&import(&options)?, &options)?;
    make_plan(&options, &image, &Host::detect()).map(|(plan, _)| plan)
}

/// A container that is about to be made.
pub struct Prepared {
    /// What it will be.
    pub plan: Plan,
    /// What it will be made of.
    pub sources: Sources,
}

/// Imports, stages, loads, serves and plans.
pub fn prepare(options: &RunOptions, host: &Host, reporter: Box<dyn Reporter>) -> Result<Prepared, Failure> {
    let path = import(options)?;
    let image = info_span!("stage").in_scope(|| stage_and_load(&path, options))?;
    info_span!("plan").in_scope(|| {
        let watch = Watch::new(reporter)?;
        let root = serve(&image, options, host, &watch)?;
        let (plan, data) = make_plan(options, &image, host)?;
        Ok(Prepared { plan, sources: Sources { root, data, watch, helper: None } })
    })
}

/// Makes the container and enters it.
pub fn build(plan: &Plan, sources: Sources, user_namespace: Option<OwnedFd>) -> Result<Namespaces, Failure> {
    info_span!("mount").in_scope(|| sandbox::build(plan, sources, user_namespace))
}

/// What was started, and how long that took, for the user and for Slurm's log.
pub fn summary(plan: &Plan) -> String {
    let known = plan.facts.reference.as_ref().or(plan.facts.digest.as_ref());
    known.map_or_else(String::new, |known| format!("{known}, ")) + &trace::phases()
}

/// The image's path. Where it is imported first, that is a part of the start that is told of.
fn import(options: &RunOptions) -> Result<PathBuf, Failure> {
    match &options.image {
        ImageSource::Unfetched(_) => info_span!("import").in_scope(|| importer::obtain(options)),
        ImageSource::File { .. } | ImageSource::Stored { .. } => importer::obtain(options),
    }
}

fn stage_and_load(path: &Path, options: &RunOptions) -> Result<Loaded, Failure> {
    limits::check_memory()?;
    let requirements = Requirements::new(&options.image, &options.policy);
    let staged = stage(path, &requirements, &options.staging).map_err(|failure| {
        // Where the job was submitted, it was there.
        match options.step.is_some() && path.symlink_metadata().is_err() {
            true => failure.or_hint(
                "this node does not have the file; put it on a file system that all nodes of the job share",
            ),
            false => failure,
        }
    });
    let StagedImage { opened, digest, provenance } = staged?;
    debug!(path = ?opened.path, kind = ?opened.kind, ?provenance, "the image");
    let of_manifest = options.image.reference().and_then(|reference| reference.digest);
    Loaded::new(opened, of_manifest.or(digest))
}

/// Where the container gets its files from.
fn serve(image: &Loaded, options: &RunOptions, host: &Host, watch: &Watch) -> Result<RootSource, Failure> {
    let path = &image.opened.path;
    Ok(match &image.content {
        Content::Squashfs(squashfs) => {
            let identity = Identity::new(host, options.settings.remap_root());
            RootSource::Squashfs(Server::start(squashfs, path, &options.command, &identity, watch)?)
        }
        // By its own name, and not by that which it was opened by: no descriptor from outside can be bound inside the
        // container's mount namespace, which a path like /proc/self/fd/0 stands for; and a link on the way may have been
        // changed since it was looked at.
        Content::Directory(_) => {
            let opened = image.opened.file.metadata();
            let opened = opened.map_err(|error| Failure::caused_by(image::shown(path), error))?;
            let real = real_path(&image.opened.file).unwrap_or_else(|_| path.clone());
            RootSource::Directory(real, opened)
        }
    })
}

/// The plan for an image, and the files of its squashfs mounts.
fn make_plan(
    options: &RunOptions,
    image: &Loaded,
    host: &Host,
) -> Result<(Plan, Vec<Arc<squashfs::Image>>), Failure> {
    raised_limits::raise_open_files();
    let metadata = image.metadata()?;
    image::check_architecture(&image.opened.path, image.tree(), &metadata)?;
    let host_libraries = host_libraries::decide(options, image.tree(), &metadata, host)?;
    // What is wrong with these is no fault of the image.
    let asked = plan::asked_mounts(options, host)?;
    let plan = Plan::make(options, image.tree(), &metadata, host, host_libraries, asked)
        .map_err(|failure| image.named(failure))?;
    debug!(mounts = plan.mounts.len(), root = plan.root.text(), "the plan");
    raised_limits::check_open_files(&plan)?;
    let mut data = Vec::new();
    for mount in &plan.mounts {
        if let MountKind::Squashfs(path) = &mount.kind {
            // Copied to this node as images are.
            let opened = stage(path, &Requirements::default(), &options.staging)
                .and_then(|staged| image::open_squashfs(&staged.opened));
            data.push(Arc::new(opened.map_err(|failure| failure.about(&mount.why))?));
        }
    }
    Ok((plan, data))
}
