//! The border to Slurm: every symbol that Slurm looks for is in this file, and every call into Slurm or libc in this
//! directory.
//!
//! Runs as the user in srun, sbatch and salloc; as root in slurmd and slurmstepd; as the user in a task.
//! Nothing that happens behind the border may end or hang these programs: panics stop here, and a hook's return
//! value is one that every Slurm release understands (see `run_hook`).
#![allow(unsafe_code)] // exported symbols, and calls into Slurm and libc

mod handle;
mod program;

#[allow(non_camel_case_types, missing_docs, dead_code, unused_qualifications)]
mod sys {
    #[cfg(not(feature = "bindgen"))]
    include!("bindings.rs");
    #[cfg(feature = "bindgen")]
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use mizzen_core::{Failure, cancel};

use crate::duplicate_load::{self, LoadRole};
use crate::state::GivenOption;
use crate::{Context, Hook, container_wanted, dispatch, other_nodes, state, version};

use handle::strings;
pub use handle::{Spank, Step};
pub use program::{
    Interruptible, forget_own_option, is_salloc, is_srun, other_owner, own_option, set_own_option,
    set_variable, unset_variable,
};

/// The plugin's name, by which Slurm tells whose an option is.
const NAME: &CStr = c"mizzen";
/// What the tasks become.
const LAUNCHER: &str = "mizzen-enter";

/// The data symbols by which Slurm knows a plugin. Their names are Slurm's.
#[allow(non_upper_case_globals)]
mod symbols {
    use super::{AtomicU32, c_int, c_uint};

    #[unsafe(no_mangle)]
    static plugin_name: [u8; 7] = *b"mizzen\0";
    #[unsafe(no_mangle)]
    static plugin_type: [u8; 6] = *b"spank\0";
    /// Slurm's version; filled in when the plugin is loaded. Slurm refuses the zero.
    #[unsafe(no_mangle)]
    pub static plugin_version: AtomicU32 = AtomicU32::new(0);
    /// The plugin's own version, which Slurm only shows.
    #[unsafe(no_mangle)]
    static spank_plugin_version: c_uint = 1;
    /// ESPANK_JOB_FAILURE: from 25.05 on, a failed init fails the job and does not drain the node.
    #[unsafe(no_mangle)]
    static slurm_spank_init_failure_mode: c_int = 3012;
}

/// Runs when the dynamic linker has loaded the plugin, before Slurm looks at its symbols.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = on_load;

extern "C" fn on_load() {
    // The plugin has a standard library of its own, so this hook sees no panic but ours. The default one would
    // write to the user's terminal, or into whatever slurmstepd has as fd 2.
    std::panic::set_hook(Box::new(|info| {
        *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner) = info.to_string().replace('\n', " ");
    }));
    if let Ok(Some(version)) = catch_unwind(version::find_slurm_version) {
        symbols::plugin_version.store(version, Ordering::Relaxed);
    }
}

/// Slurm's version as (major, minor).
pub fn slurm_version() -> (u32, u32) {
    let word = symbols::plugin_version.load(Ordering::Relaxed);
    (word >> 16, word >> 8 & 0xff)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_init(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::Init, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_init_post_opt(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::InitPostOpt, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_local_user_init(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::LocalUserInit, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_task_init_privileged(
    spank: sys::spank_t,
    argc: c_int,
    argv: *mut *mut c_char,
) -> c_int {
    run_hook(Hook::TaskInitPrivileged, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_task_post_fork(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::TaskPostFork, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_task_exit(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::TaskExit, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_exit(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::Exit, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_task_init(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::TaskInit, spank, argc, argv)
}

/// Runs a hook and turns a failure into what Slurm handles properly. A client exits once its options are parsed,
/// and has submitted nothing. An srun that has its step hands a failure to the nodes (`broadcast.rs`); only a bug of ours gets
/// here then, and the -1 leaves the step behind, but starts nothing. A task exits, and is a failed task.
/// Every other failure must wait for those, and every other hook returns 0: for another value Slurm, depending on
/// hook, release and `required` or `optional` in plugstack.conf, drains the node, reports success, or goes on without us.
fn run_hook(hook: Hook, handle: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    let context = current_context();
    let spank = Spank(handle);
    let outcome = catch_panic(|| {
        if hook == Hook::Init {
            // SAFETY: Slurm passes the plugin's words of plugstack.conf as argc and argv.
            state::lock().arguments = unsafe { strings(argv, argc) };
        }
        inject_panic(context, hook.name());
        if has_nothing_to_do(hook, context) { Ok(()) } else { dispatch(hook, context, &spank) }
    });
    let failure = match outcome {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => failure,
        // A bug of ours must not touch a job that wants no container. If even that cannot be found out, it does.
        Err(_) if catch_panic(|| container_wanted(context, &spank)) == Ok(false) => return 0,
        Err(panic) => panic,
    };
    match (hook, context) {
        (Hook::InitPostOpt, Context::Client) => refuse_command(&failure),
        (Hook::LocalUserInit, Context::Client) => {
            report(&failure);
            -1
        }
        (Hook::TaskInit, Context::Stepd) => end_task(&spank, &failure),
        _ => {
            state::lock().keep_first_failure(failure);
            0
        }
    }
}

/// Whether another line of plugstack.conf has loaded mizzen too: then only the hooks in which a job is refused matter.
fn has_nothing_to_do(hook: Hook, context: Context) -> bool {
    let mut state = state::lock();
    if hook == Hook::Init {
        state.loads += 1;
        state.load_role = duplicate_load::load_role(&plugin_file().unwrap_or_default(), state.loads);
        if let LoadRole::Refuses(why) = &state.load_role {
            let why = why.clone();
            state.keep_first_failure(why);
        }
        return matches!(state.load_role, LoadRole::Idle) || state.loads > 1;
    }
    match (&state.load_role, hook, context) {
        (LoadRole::Only, _, _) => false,
        (LoadRole::Refuses(_), Hook::InitPostOpt, Context::Client) => false,
        (LoadRole::Refuses(_), Hook::TaskInit, Context::Stepd) => false,
        (LoadRole::Refuses(_) | LoadRole::Idle, _, _) => true,
    }
}

/// Slurm calls this with the value of an option, in the client and again in slurmstepd.
extern "C" fn option_callback(index: c_int, value: *const c_char, _remote: c_int) -> c_int {
    let outcome = catch_panic(|| {
        state::lock().wanted = true; // before anything can go wrong
        inject_panic(current_context(), "option");
        // SAFETY: Slurm passes the option's argument, if any, as a C string that lives during the call.
        let value = if value.is_null() { c"" } else { unsafe { CStr::from_ptr(value) } };
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        state::lock().options.push(GivenOption { index, value: value.to_bytes().to_vec() });
    });
    if let Err(panic) = outcome {
        state::lock().keep_first_failure(panic);
    }
    0
}

/// Runs our code so that a panic in it comes back as a failure.
fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|_| {
        let what = std::mem::take(&mut *LAST_PANIC.lock().unwrap_or_else(PoisonError::into_inner));
        Failure::new(format!("internal error: {what}")).hint("this is a bug in mizzen; please report it")
    })
}

/// What the last panic said, and where it was.
static LAST_PANIC: Mutex<String> = Mutex::new(String::new());

/// Tests build the plugin with this to see that a bug anywhere harms neither slurmstepd nor the promise that a
/// job runs in its container or not at all.
#[cfg(feature = "inject-panic")]
#[allow(clippy::panic)]
fn inject_panic(context: Context, place: &str) {
    let wanted =
        format!("inject-panic={}:{place}", if context == Context::Client { "client" } else { "node" });
    let state = state::lock();
    if state.arguments.iter().any(|argument| argument == wanted.as_bytes()) {
        panic!("injected at {place}"); // with the state locked: a poisoned lock must not matter
    }
}

#[cfg(not(feature = "inject-panic"))]
fn inject_panic(_: Context, _: &str) {}

fn current_context() -> Context {
    // SAFETY: takes nothing and only reads Slurm's own state.
    match unsafe { sys::spank_context() } {
        sys::S_CTX_LOCAL | sys::S_CTX_ALLOCATOR => Context::Client,
        sys::S_CTX_REMOTE => Context::Stepd,
        sys::S_CTX_SLURMD => Context::Slurmd,
        _ => Context::Script,
    }
}

/// The launcher, beside the plugin, under a name by which it knows what to do.
pub fn launcher() -> Result<CString, Failure> {
    let directory = plugin_directory().ok_or_else(|| Failure::new("cannot find the plugin's own file"))?;
    let launcher = directory.join(LAUNCHER);
    if !launcher.is_file() {
        let message = format!("{}: the launcher is missing", launcher.display());
        return Err(Failure::new(message).hint("it belongs beside spank_mizzen.so; install both together"));
    }
    CString::new(launcher.as_os_str().as_bytes()).map_err(|_| Failure::new("NUL in the launcher's path"))
}

/// The directory of the plugin's file.
fn plugin_directory() -> Option<PathBuf> {
    Some(plugin_file()?.parent()?.to_owned())
}

/// The plugin's file, as the dynamic linker knows it.
fn plugin_file() -> Option<PathBuf> {
    // SAFETY: a C structure of pointers for which zeros are valid.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here = on_load as *const c_void;
    // SAFETY: the linker writes the structure; the file's name lives as long as the plugin is loaded.
    let name = unsafe {
        if libc::dladdr(here, &raw mut found) == 0 || found.dli_fname.is_null() {
            return None;
        }
        CStr::from_ptr(found.dli_fname)
    };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Lets a descriptor pass through exec.
pub fn keep_through_exec(fd: BorrowedFd) {
    // SAFETY: clears a flag of an open descriptor.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) };
}

/// Ends srun, sbatch or salloc as they end themselves for a bad option.
fn refuse_command(failure: &Failure) -> ! {
    report(failure);
    let code = std::env::var("SLURM_EXIT_ERROR").ok().and_then(|code| code.parse().ok()).unwrap_or(1);
    // SAFETY: the program's own way to end; nothing is allocated or submitted yet.
    unsafe { libc::exit(code) }
}

/// Ends a task that must not run on the host. One task of the step on this node says why; the others would only say
/// it again.
fn end_task(spank: &Spank, failure: &Failure) -> ! {
    let speaks = match &state::lock().channel {
        Some(channel) => channel.claim_report(),
        None => spank.local_task_id().unwrap_or(0) == 0,
    };
    if speaks {
        cancel::hold_back_signals();
        report(failure);
        if let (Some(nodes), Some(step)) = (other_nodes::find(spank), spank.step_name()) {
            cancel::cancel_step(&step, &nodes);
        }
    }
    // SAFETY: ends the process at once, without the exit handlers that slurmstepd has registered.
    unsafe { libc::_exit(c_int::from(failure.kind.exit_code())) }
}

/// Tells the user, and Slurm's log.
pub fn report(failure: &Failure) {
    log_error(&failure.message);
    if let Some(hint) = &failure.hint {
        log_error(&format!("hint: {hint}"));
    }
}

/// A text of ours for Slurm; it has no NUL.
fn c_string(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

fn log_error(text: &str) {
    let line = c_string(&format!("mizzen: {text}"));
    // SAFETY: the format takes one string.
    unsafe { sys::slurm_error(c"%s".as_ptr(), line.as_ptr()) };
}

/// Tells the user something that is not an error; on a node, Slurm's log.
pub fn log_info(text: &str) {
    let line = c_string(&format!("mizzen: {text}"));
    // SAFETY: the format takes one string.
    unsafe { sys::slurm_info(c"%s".as_ptr(), line.as_ptr()) };
}
