//! How a container is started, from parsed options to the running program. Read this file first. `mizzen run` does all of it; in
//! a Slurm step the first task on a node does it for the others (`step/mod.rs`), and under mpirun the first rank
//! (`share/mod.rs`).
//!
//!     options -> find -> import -> stage -> load -> serve -> plan -> build -> exec
//!
//! | part   | what it gives                      | what it does to the node                                           |
//! |--------|------------------------------------|--------------------------------------------------------------------|
//! | find   | a named container, if one is meant | waits for others who start it; makes it when it is planned           |
//! | import | the image's path                   | where the site wants that: imports it into the user's store        |
//! | stage  | the image's file                   | may copy the image to the node                                     |
//! | load   | the image's files, readable        | nothing                                                            |
//! | serve  | a file server, for a squashfs      | starts a process, which reads ahead while the rest is planned      |
//! | plan   | every mount, variable, name        | nothing: computed from plain facts; squashfs mounts are staged too |
//! | build  | namespaces with everything mounted | this process is inside from here on                                |
//! | exec   | the program                        | this process becomes it                                            |
//!
//! Runs as the user on the host, and from `build` on in the container's namespaces.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mizzen_core::image::real_path;
use mizzen_core::request::ImageSource;
use mizzen_core::settings::{Key, Unshare, Verbosity, Workdir};
use mizzen_core::{Failure, limits};
use mizzen_squashfs as squashfs;
use tracing::{debug, info_span};

use crate::containers::{self, Claim, Found, Running};
use crate::host::Host;
use crate::image::{self, Content, DirectoryTree, Loaded, Tree};
use crate::mount::MountKind;
use crate::options::RunOptions;
use crate::plan::{self, Explained, Facts, Identity, NamedRoot, Plan, Program, typed_command};
use crate::report::report_note;
use crate::sandbox::{
    self, Namespaces, Others, Owner, Reporter, RootSource, SaveTarget, Saved, Server, ServerLock, Serving,
    Sources, StderrReporter, Watch, WhenEntered,
};
use crate::save_target::save_target;
use crate::stage::profile::{StartProfile, StartedImage};
use crate::stage::{FileIdentity, Provenance, Requirements, StagedImage, StagingOptions, stage};
use crate::{host_libraries, importer, raised_limits, sys, trace};

/// Runs a program in a container of its own, or in a named one: becomes it, or returns why not.
pub fn run(mut options: RunOptions) -> Result<i32, Failure> {
    let reporter = Box::new(StderrReporter::for_this_process().with_verbosity(options.settings.verbose()));
    let save = save_target(&options, None)?;
    let claim = match containers::find(&mut options)? {
        None => None,
        Some(Found::Startable(claim)) => Some(*claim),
        Some(Found::Running(running)) => return run_in(*running, &options, reporter, save.as_ref()),
        Some(Found::Step(step)) => {
            return Err(Failure::new(format!("the container \"{step}\" is that of a step"))
                .hint(format!("srun --overlap --container-join={step} enters it")));
        }
    };
    let options = &options;
    let prepared = prepare_run(options, reporter, claim)?;
    if prepared.plan.unshare.pid {
        return sandbox::run_as_child(&prepared.plan, prepared.sources);
    }
    let (plan, _) = build_and_enter(options, prepared)?;
    run_program(&plan.program, save.as_ref())
}

/// Prepares the container of `mizzen run`, and tells what the user should know.
pub fn prepare_run(
    options: &RunOptions,
    reporter: Box<dyn Reporter>,
    claim: Option<Claim>,
) -> Result<Prepared, Failure> {
    let prepared = prepare(options, &Host::detect(), reporter, claim)?;
    prepared.plan.notes.iter().for_each(|note| report_note(note));
    Ok(prepared)
}

/// Makes that container and enters it.
pub fn build_and_enter(options: &RunOptions, prepared: Prepared) -> Result<(Plan, Namespaces), Failure> {
    let Prepared { plan, sources } = prepared;
    let namespaces = build(&plan, sources, None)?;
    if options.settings.verbose() != Verbosity::Quiet {
        report_note(&summary(&plan));
    }
    if let Some(note) = sandbox::dangling_argument(&options.command, &plan.facts.workdir) {
        report_note(&note);
    }
    Ok((plan, namespaces))
}

/// Becomes the program; or, if the container is to be saved, runs it and does that.
fn run_program(program: &Program, save: Option<&SaveTarget>) -> Result<i32, Failure> {
    let Some(save) = save else { return Err(sandbox::exec_program(program)) };
    let Saved { end, outcome } = save.run(program, Others::None)?;
    report_note(&outcome.map_err(|failure| failure.about("--save"))?);
    Ok(end.imitate())
}

/// Runs a program in a named container that runs.
fn run_in(
    running: Running,
    options: &RunOptions,
    reporter: Box<dyn Reporter>,
    save: Option<&SaveTarget>,
) -> Result<i32, Failure> {
    let environment = Host::detect().environment;
    let Entered { facts, notes, .. } = enter(running, options, reporter, true)?;
    notes.iter().for_each(|note| report_note(note));
    let mut command = typed_command(options, &facts);
    if command.value.is_empty() {
        command = Explained { value: vec!["/bin/sh".into()], why: "a shell".to_owned() };
    }
    run_program(&Program::new(options, &facts, command, &environment), save)
}

/// Makes a named container without starting it. `clear` is done when its image is known to be good.
pub fn create(mut options: RunOptions, clear: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    let (image, _) = stage_and_load(&import(&options)?, &options)?;
    clear()?;
    match containers::find(&mut options)? {
        Some(Found::Startable(mut claim)) => claim.root(&options, &image).and_then(|_| claim.make()),
        _ => Err(Failure::new("a container that is to be made runs")),
    }
}

/// Saves a named container without a program in it.
pub fn save(mut options: RunOptions, target: &SaveTarget) -> Result<(), Failure> {
    let reporter = Box::new(StderrReporter::for_this_process());
    match containers::find(&mut options)? {
        Some(Found::Running(running)) => {
            let entered = enter(*running, &options, reporter, true)?;
            entered.notes.iter().for_each(|note| report_note(note));
        }
        Some(Found::Startable(claim)) => {
            let prepared = prepare_run(&options, reporter, Some(*claim))?;
            build_and_enter(&options, prepared)?;
        }
        Some(Found::Step(_)) | None => {
            return Err(Failure::new("only a container with a name can be saved so"));
        }
    }
    report_note(&target.save_now()?);
    Ok(())
}

/// Everything but the side effects, for `mizzen plan`: the image is read where it is, and nothing is served.
pub fn plan(options: &RunOptions) -> Result<Plan, Failure> {
    let mut options = RunOptions { staging: StagingOptions::never(), ..options.clone() };
    let named = containers::look(&mut options)?;
    let (image, _) = stage_and_load(&import(&options)?, &options)?;
    make_plan(&options, &image, image.tree(), &Host::detect(), named).map(|(plan, _)| plan)
}

/// A container that is about to be made.
pub struct Prepared {
    /// What it will be.
    pub plan: Plan,
    /// What it will be made of.
    pub sources: Sources,
}

/// Imports, stages, loads, serves and plans. With a claim, for a named container, which is made if it is not there.
pub fn prepare(
    options: &RunOptions,
    host: &Host,
    reporter: Box<dyn Reporter>,
    mut claim: Option<Claim>,
) -> Result<Prepared, Failure> {
    let path = import(options)?;
    let (image, origin) = info_span!("stage").in_scope(|| stage_and_load(&path, options))?;
    info_span!("plan").in_scope(|| {
        let watch = Watch::new(reporter)?;
        let named = claim.as_mut().map(|claim| claim.root(options, &image)).transpose()?;
        let (root, tree, lone) = match claim.as_mut().and_then(Claim::take_running) {
            None => {
                let lock = claim.as_ref().map(Claim::server_lock);
                (serve(&image, &origin, options, host, &watch, lock.as_ref())?, None, None)
            }
            Some(running) => {
                let Second { root, tree, lone } = share(running, options, &watch)?;
                (root, Some(tree), lone)
            }
        };
        let tree = tree.as_ref().map_or(image.tree(), |tree| tree);
        let (mut plan, data) = make_plan(options, &image, tree, host, named)?;
        plan.notes.extend(lone);
        if let Some(claim) = &mut claim {
            claim.make()?;
            plan.notes.extend(claim.note.take());
        }
        // From then on others find it.
        let when_entered = claim.map(|claim| Box::new(move |plan: &Plan| claim.started(plan)) as WhenEntered);
        Ok(Prepared { plan, sources: Sources { root, data, watch, helper: None, when_entered } })
    })
}

/// What a second container on the files of one that runs is made of.
struct Second {
    root: RootSource,
    /// What is there now.
    tree: DirectoryTree,
    /// Why the files may end before this container.
    lone: Option<String>,
}

/// Has the files of a container that runs for a second one, with a file server that goes on with them.
fn share(mut running: Running, options: &RunOptions, watch: &Watch) -> Result<Second, Failure> {
    let lone = go_on_serving(&mut running, options, watch, options.step.is_none())?;
    let named = |failure: Failure| failure.about(format!("the container \"{}\"", running.name()));
    let mount = running.namespaces.clone_root().map_err(named)?;
    let tree = DirectoryTree::from_file(&mount)
        .map_err(|error| named(Failure::caused_by("cannot look into its files", error)))?;
    Ok(Second { root: RootSource::Clone(mount), tree, lone })
}

/// A container of others that this process has entered.
pub struct Entered {
    /// Where it is now.
    pub namespaces: Namespaces,
    /// What its program needs to know.
    pub facts: Facts,
    /// What the user should know.
    pub notes: Vec<String>,
    /// What slurmd's log should tell, too.
    pub lone: Option<String>,
}

/// Enters a named container that runs, for this process, if that is `alone`, or for all tasks of the step.
pub fn enter(
    mut running: Running,
    options: &RunOptions,
    reporter: Box<dyn Reporter>,
    alone: bool,
) -> Result<Entered, Failure> {
    let mut facts = Facts { unshare: running.namespaces.unshare, ..running.facts(options) };
    check_namespaces(options, facts.unshare)?;
    let mut notes = std::mem::take(&mut running.notes);
    let watch = Watch::new(reporter)?;
    // It can be entered all the same.
    let lone = go_on_serving(&mut running, options, &watch, alone)?;
    watch.arm(running.namespaces.user.as_fd());
    notes.extend(lone.clone());
    let cwd = std::env::current_dir().ok();
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let outside = cwd.as_deref().and_then(identity);
    running.namespaces.enter()?;
    notes.extend(containers::missing_pmix());
    let here = || cwd.clone().filter(|cwd| outside.is_some() && identity(cwd) == outside);
    let is_asked = start_in_asked_directory(options, cwd.as_deref(), &mut facts);
    if let Some(here) = here().filter(|_| !is_asked) {
        facts.workdir = here;
        facts.workdir_why = "the current directory".to_owned();
    }
    Ok(Entered { namespaces: running.namespaces, facts, notes, lone })
}

/// The directory that the user names for the program, if they do.
pub fn start_in_asked_directory(options: &RunOptions, cwd: Option<&Path>, facts: &mut Facts) -> bool {
    let Some(Workdir::Directory(workdir)) = &options.settings.workdir else { return false };
    facts.workdir = cwd.unwrap_or(Path::new("/")).join(workdir);
    facts.workdir_why = options.user().name_of(Key::Workdir);
    true
}

/// A container that runs has the namespaces that it was started with.
pub fn check_namespaces(options: &RunOptions, own: Unshare) -> Result<(), Failure> {
    let names = [
        ("network", options.unshare.net, own.net),
        ("IPC", options.unshare.ipc, own.ipc),
        ("UTS", options.unshare.uts, own.uts),
    ];
    match names.into_iter().find(|(_, wanted, has)| *wanted && !*has) {
        None => Ok(()),
        Some((name, ..)) => {
            let message = format!("requested but the container is not in a separate {name} namespace");
            Err(Failure::new(message)
                .about(options.user().name_of(Key::Unshare))
                .hint("it runs already; wait for its end, or give the option when it is started"))
        }
    }
}

/// Has a file server stand by, or tells why the files end with those who have started the container. The server is needed as long as
/// this process, if that is `alone`, or as long as slurmstepd, its parent, which ends with the last task of the step on this node.
fn go_on_serving(
    running: &mut Running,
    options: &RunOptions,
    watch: &Watch,
    alone: bool,
) -> Result<Option<String>, Failure> {
    let until = if alone { nix::unistd::getpid() } else { nix::unistd::getppid() };
    running.server_lock.until = sys::pidfd_of(until.as_raw()).ok();
    let Err(failure) = stand_by(running, options, watch) else { return Ok(None) };
    watch_others(watch, running, options)?;
    let name = running.name();
    Ok(Some(format!(
        "the files of the container \"{name}\" end with the step that has started it: {failure}"
    )))
}

/// The files of the container come from a server that ends with the step which has started it: another one is to go on then.
fn stand_by(running: &Running, options: &RunOptions, watch: &Watch) -> Result<(), Failure> {
    let (connection, files) = match &running.serving {
        Serving::Nobody => return Ok(()),
        Serving::Alone(why) => return Err(Failure::new(*why)),
        Serving::Shared { connection, files } => (connection, files),
    };
    let image = served_image(running, options, files)?;
    let path = &image.opened.path;
    let Content::Squashfs(squashfs) = &image.content else { return Err(other_image(path)) };
    let lock = Some(&running.server_lock);
    Server::start(squashfs, path, &options.command, running.owner(), watch, lock, None)?.stand_by(connection)
}

/// The image whose files the container has: another file of that name has other files in the same places, and the kernel asks by
/// the places that it knows. So it has to be the very file that the server has open.
fn served_image(running: &Running, options: &RunOptions, files: &[(u64, u64)]) -> Result<Loaded, Failure> {
    let path = import(options)?;
    // The server may have a copy, or the original, whatever a start would take now.
    let uncopied = RunOptions { staging: StagingOptions::never(), ..options.clone() };
    for options in [options, &uncopied] {
        let (image, _) = stage_and_load(&path, options)?;
        running.check(&image)?;
        if let Content::Squashfs(squashfs) = &image.content
            && sandbox::reads_one_of(files, &squashfs.source().descriptors())
        {
            return Ok(image);
        }
    }
    Err(other_image(&path))
}

fn other_image(path: &Path) -> Failure {
    Failure::new(format!("{} is another file than the one that it was made from", image::shown(path)))
}

/// Where no file server of this step's can go on, the step is told at least when there is none any more.
fn watch_others(watch: &Watch, running: &Running, options: &RunOptions) -> Result<(), Failure> {
    let connection = match &running.serving {
        Serving::Nobody => return Ok(()),
        Serving::Alone(_) => None,
        Serving::Shared { connection, .. } => Some(connection),
    };
    let name = options.image.name();
    sandbox::watch_others(watch, &running.server_lock, Path::new(&name), connection)
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
        ImageSource::File { .. } | ImageSource::Stored { .. } | ImageSource::Recorded => {
            importer::obtain(options)
        }
    }
}

/// Where the bytes of an image come from.
struct Origin {
    /// What the image's file was when it was opened.
    identity: Option<FileIdentity>,
    provenance: Provenance,
}

fn stage_and_load(path: &Path, options: &RunOptions) -> Result<(Loaded, Origin), Failure> {
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
    let StagedImage { opened, identity, digest, provenance, source } = staged?;
    debug!(path = ?opened.path, kind = ?opened.kind, ?provenance, "the image");
    let of_manifest = options.image.reference().and_then(|reference| reference.digest);
    Ok((Loaded::new(opened, source, of_manifest.or(digest))?, Origin { identity, provenance }))
}

/// Where the container gets its files from.
fn serve(
    image: &Loaded,
    origin: &Origin,
    options: &RunOptions,
    host: &Host,
    watch: &Watch,
    lock: Option<&ServerLock>,
) -> Result<RootSource, Failure> {
    let path = &image.opened.path;
    Ok(match &image.content {
        Content::Squashfs(squashfs) => {
            let identity = Identity::new(host, options.settings.remap_root());
            let owner = Owner::new(&identity);
            let is_verified = options
                .staging
                .verifies(Requirements::new(&options.image, &options.policy).content_matters());
            let command = &options.command;
            // What was changed in a container with a name, in an earlier step, stands for the very layers that were below it then.
            let has_no_name = lock.is_none();
            let find = |identity| {
                let started = StartedImage { identity, provenance: origin.provenance, is_verified };
                StartProfile::find(&started, command, &options.staging)
            };
            let profile = origin.identity.as_ref().filter(|_| has_no_name).and_then(find);
            let server = Server::start(squashfs, path, command, owner, watch, lock, profile.as_ref())?;
            RootSource::Squashfs(server)
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

/// The plan for an image with these files, and the files of its squashfs mounts.
fn make_plan(
    options: &RunOptions,
    image: &Loaded,
    tree: &dyn Tree,
    host: &Host,
    named: Option<NamedRoot>,
) -> Result<(Plan, Vec<Arc<squashfs::Image>>), Failure> {
    raised_limits::raise_open_files();
    let metadata = image.metadata()?;
    image::check_architecture(&image.opened.path, tree, &metadata)?;
    let host_libraries = host_libraries::decide(options, tree, &metadata, host)?;
    // What is wrong with these is no fault of the image.
    let asked = plan::asked_mounts(options, host)?;
    let plan = Plan::make(options, tree, &metadata, host, host_libraries, asked, named)
        .map_err(|failure| image.named(failure))?;
    debug!(mounts = plan.mounts.len(), root = plan.root.text(), "the plan");
    raised_limits::check_open_files(&plan)?;
    let mut data = Vec::new();
    for mount in &plan.mounts {
        if let MountKind::Squashfs(path) = &mount.kind {
            // Copied to this node as images are.
            let opened = stage(path, &Requirements::default(), &options.staging)
                .and_then(|staged| image::open_squashfs(&staged.opened, staged.source));
            data.push(Arc::new(opened.map_err(|failure| failure.about(&mount.why))?));
        }
    }
    Ok((plan, data))
}
