//! The border to Slurm: every symbol that Slurm looks for and every call into Slurm or libc is in this file.
//!
//! Runs as the user in srun, sbatch and salloc; as root in slurmd and slurmstepd; as the user in a task.
//! Nothing that happens behind the border may end or hang these programs: panics stop here, and a hook's return
//! value is one that every Slurm release understands (see `run_hook`).
#![allow(unsafe_code)] // exported symbols, and calls into Slurm and libc

#[allow(non_camel_case_types, missing_docs, dead_code, unused_qualifications)]
mod sys {
    #[cfg(not(feature = "bindgen"))]
    include!("bindings.rs");
    #[cfg(feature = "bindgen")]
    include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
}

use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use mizzen_core::Failure;
use mizzen_core::slurm_options::{Argument, OptionSpec};

use crate::state::Reported;
use crate::{Context, Hook, container_wanted, dispatch, state, version};

/// mizzen failed to start what was asked for, as with docker, podman and env.
const EXIT_CANNOT_START: c_int = 125;

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
    if let Ok(Some(version)) = catch_unwind(version::find) {
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
extern "C" fn slurm_spank_exit(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::Exit, spank, argc, argv)
}

#[unsafe(no_mangle)]
extern "C" fn slurm_spank_task_init(spank: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    run_hook(Hook::TaskInit, spank, argc, argv)
}

/// Runs a hook and turns a failure into what Slurm handles properly. A client exits once its options are parsed,
/// and has submitted nothing. A task exits, and is a failed task. Every other failure must wait for those two, and
/// every hook returns 0: for another value Slurm, depending on hook, release and `required` or `optional` in
/// plugstack.conf, drains the node, reports success, or goes on without us.
fn run_hook(hook: Hook, handle: sys::spank_t, argc: c_int, argv: *mut *mut c_char) -> c_int {
    let context = current_context();
    let spank = Spank(handle);
    let outcome = catch_panic(|| {
        if hook == Hook::Init {
            // SAFETY: Slurm passes the plugin's words of plugstack.conf as argc and argv.
            state::lock().arguments = unsafe { strings(argv, argc) };
        }
        inject_panic(context, hook.name());
        dispatch(hook, context, &spank)
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
        (Hook::TaskInit, Context::Node) => end_task(&spank, &failure),
        _ => {
            state::lock().latch(failure);
            0
        }
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
        state::lock().options.push(Reported { index, value: value.to_bytes().to_vec() });
    });
    if let Err(panic) = outcome {
        state::lock().latch(panic);
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
        sys::S_CTX_REMOTE => Context::Node,
        _ => Context::Slurmd,
    }
}

/// Slurm's handle, valid during one hook.
pub struct Spank(sys::spank_t);

impl Spank {
    /// Adds the option with this index in [`options::ALL`].
    pub fn register_option(&self, index: usize, spec: &OptionSpec) -> Result<(), Failure> {
        let (has_arg, argument) = match spec.argument {
            Argument::No => (0, std::ptr::null()),
            Argument::Required(name) => (1, name.as_ptr()),
            Argument::Optional(name) => (2, name.as_ptr()),
        };
        let mut option = sys::spank_option {
            name: spec.name.as_ptr().cast_mut(),
            arginfo: argument.cast_mut(),
            usage: spec.usage.as_ptr().cast_mut(),
            has_arg,
            val: index as c_int,
            cb: Some(option_callback),
        };
        // SAFETY: the handle is Slurm's own; Slurm copies the option and does not write to its strings.
        let code = unsafe { sys::spank_option_register(self.0, &raw mut option) };
        if code == 0 {
            return Ok(());
        }
        let name = spec.name.to_string_lossy();
        Err(Failure::new(format!("Slurm refuses the option --{name} (spank_option_register: {code})"))
            .hint("another plugin in plugstack.conf may have taken the name"))
    }

    /// A variable of the job's environment; in slurmstepd and its tasks.
    pub fn job_variable(&self, name: &str) -> Result<Option<Vec<u8>>, Failure> {
        let mut environment: *mut *mut c_char = std::ptr::null_mut();
        // SAFETY: for S_JOB_ENV Slurm expects a char ***, and gives its own array, ended by NULL.
        let code = unsafe { sys::spank_get_item(self.0, sys::S_JOB_ENV, &raw mut environment) };
        if code != 0 || environment.is_null() {
            return Err(Failure::new(format!(
                "Slurm does not tell the job's environment (spank_get_item: {code})"
            )));
        }
        // SAFETY: see above; nothing changes the array while the hook runs.
        let variables = unsafe { strings(environment, c_int::MAX) };
        let value =
            |variable: &Vec<u8>| Some(variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=")?.to_vec());
        Ok(variables.iter().find_map(value))
    }

    /// The number of this task among those of its step on this node; in tasks, and after their fork.
    pub fn local_task_id(&self) -> Option<i32> {
        self.number(sys::S_TASK_ID, 0)
    }

    /// How many tasks the step has on this node.
    pub fn local_task_count(&self) -> Option<u32> {
        self.number(sys::S_JOB_LOCAL_TASK_COUNT, 0)
    }

    /// The process of the task that has just been forked.
    pub fn task_pid(&self) -> Option<i32> {
        self.number(sys::S_TASK_PID, 0)
    }

    /// The job's number.
    pub fn job_id(&self) -> Option<u32> {
        self.number(sys::S_JOB_ID, 0)
    }

    /// Which step of the job this is.
    pub fn step(&self) -> Option<Step> {
        // Slurm's numbers for what users know by name, the same in every release.
        Some(match self.number(sys::S_JOB_STEPID, 0)? {
            0xffff_fffc_u32 => Step::Extern,
            0xffff_fffb => Step::Batch,
            0xffff_fffa => Step::Interactive,
            number => Step::Number(number),
        })
    }

    /// The user, the primary group, and all groups.
    pub fn identity(&self) -> Result<(u32, u32, Vec<u32>), Failure> {
        let unknown = || Failure::new("Slurm does not tell who the user is");
        let uid = self.number(sys::S_JOB_UID, 0).ok_or_else(unknown)?;
        let gid = self.number(sys::S_JOB_GID, 0).ok_or_else(unknown)?;
        let mut groups: *mut libc::gid_t = std::ptr::null_mut();
        let mut count: c_int = 0;
        // SAFETY: for this item Slurm expects a gid_t ** and an int *, and gives its own array.
        let code = unsafe {
            sys::spank_get_item(self.0, sys::S_JOB_SUPPLEMENTARY_GIDS, &raw mut groups, &raw mut count)
        };
        if code != 0 {
            return Err(unknown());
        }
        let count = if groups.is_null() { 0 } else { usize::try_from(count).unwrap_or(0) };
        // SAFETY: the array has as many elements as Slurm says; each is copied at once.
        let groups = (0..count).map(|index| unsafe { groups.add(index).read() }).collect();
        Ok((uid, gid, groups))
    }

    /// An item that Slurm writes as a 32-bit number.
    fn number<T: Copy>(&self, item: sys::spank_item, initial: T) -> Option<T> {
        const { assert!(size_of::<T>() == 4) };
        let mut value = initial;
        // SAFETY: the callers name items for which Slurm expects a pointer to a 32-bit number.
        let code = unsafe { sys::spank_get_item(self.0, item, &raw mut value) };
        (code == 0).then_some(value)
    }

    /// Sets a variable of the task.
    pub fn set_job_variable(&self, name: &str, value: &str) -> Result<(), Failure> {
        let text = |text: &str| CString::new(text).map_err(|_| Failure::new(format!("NUL in {name}")));
        let (name_text, value) = (text(name)?, text(value)?);
        // SAFETY: Slurm copies both strings.
        match unsafe { sys::spank_setenv(self.0, name_text.as_ptr(), value.as_ptr(), 1) } {
            0 => Ok(()),
            code => Err(Failure::new(format!("Slurm refuses the variable {name} (spank_setenv: {code})"))),
        }
    }

    /// Removes a variable of the task.
    pub fn unset_job_variable(&self, name: &CStr) {
        // SAFETY: Slurm only reads the string. It is no matter whether the variable was there.
        unsafe { sys::spank_unsetenv(self.0, name.as_ptr()) };
    }

    /// The task's program and its arguments; before 23.11 with `--multi-prog`, that option's file and its content.
    pub fn arguments(&self) -> Result<Vec<Vec<u8>>, Failure> {
        let (argc, argv) = self.task_arguments()?;
        // SAFETY: Slurm's own array of as many C strings.
        Ok(unsafe { strings(argv, argc) })
    }

    fn task_arguments(&self) -> Result<(c_int, *mut *mut c_char), Failure> {
        let mut argc: c_int = 0;
        let mut argv: *mut *mut c_char = std::ptr::null_mut();
        // SAFETY: for S_JOB_ARGV Slurm expects an int * and a char ***, and gives the task's own array.
        let code = unsafe { sys::spank_get_item(self.0, sys::S_JOB_ARGV, &raw mut argc, &raw mut argv) };
        if code != 0 || argv.is_null() {
            let message = format!("Slurm does not tell the task's program (spank_get_item: {code})");
            return Err(Failure::new(message));
        }
        Ok((argc, argv))
    }

    /// Lets another program start in place of the task's, which it finds behind its own name in the arguments. Where
    /// Slurm has no call for that (before 23.11), the other takes the place of the task's program in the arguments
    /// instead; the return value is then the name that stood there.
    pub fn start_instead(&self, launcher: &CStr) -> Result<Option<OsString>, Failure> {
        type Prepend = unsafe extern "C" fn(sys::spank_t, c_int, *const *const c_char) -> sys::spank_err_t;
        let this_process = libloading::os::unix::Library::this();
        // SAFETY: the type is that of the header of every release that has the function.
        if let Ok(prepend) = unsafe { this_process.get::<Prepend>(b"spank_prepend_task_argv\0") } {
            let words = [launcher.as_ptr()];
            // SAFETY: Slurm copies the words.
            return match unsafe { prepend(self.0, 1, words.as_ptr()) } {
                0 => Ok(None),
                code => {
                    Err(Failure::new(format!("Slurm refuses the launcher (spank_prepend_task_argv: {code})")))
                }
            };
        }
        let (argc, argv) = self.task_arguments()?;
        if argc < 1 {
            return Err(Failure::new("Slurm does not tell the task's program"));
        }
        // SAFETY: there is at least one element, a C string. The task is a process of its own with one thread: nobody
        // else sees the array, which Slurm passes to execve next. The old string is Slurm's and stays as it is.
        let program = unsafe {
            let program = CStr::from_ptr(argv.read()).to_bytes().to_vec();
            argv.write(launcher.to_owned().into_raw());
            program
        };
        Ok(Some(OsString::from_vec(program)))
    }
}

/// A step of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Started by srun.
    Number(u32),
    /// The batch script.
    Batch,
    /// The shell of salloc, where that runs on the node.
    Interactive,
    /// What is started on the node from outside Slurm.
    Extern,
}

/// An option of srun, sbatch or salloc itself, as text; None if it is not set, or the program does not tell.
pub fn own_option(name: &CStr) -> Option<Vec<u8>> {
    type Get = unsafe extern "C" fn(*mut c_void, *const c_char) -> *const c_char;
    let (options, get) = own_options::<Get>(b"slurm_option_get\0")?;
    // SAFETY: the program's own options, and a name that the function only compares. It gives a C string, or NULL.
    let value = unsafe {
        let value = get(options, name.as_ptr());
        if value.is_null() {
            return None;
        }
        CStr::from_ptr(value)
    };
    Some(value.to_bytes().to_vec()).filter(|value| value != b"unset")
}

/// Makes the program forget one of its own options; false if it cannot.
pub fn forget_own_option(name: &CStr) -> bool {
    type Reset = unsafe extern "C" fn(*mut c_void, *const c_char) -> bool;
    // SAFETY: as above.
    own_options::<Reset>(b"slurm_option_reset\0")
        .is_some_and(|(options, reset)| unsafe { reset(options, name.as_ptr()) })
}

/// Whether this program is srun.
pub fn is_srun() -> bool {
    // SAFETY: takes nothing and only reads Slurm's own state.
    unsafe { sys::spank_context() == sys::S_CTX_LOCAL }
}

/// The options of srun, sbatch or salloc, and a function of Slurm's library for them. Both are there since 20.11; in a
/// release that had none, only what the callers do with them would be lost.
fn own_options<F: Copy>(function: &[u8]) -> Option<(*mut c_void, F)> {
    let this_process = libloading::os::unix::Library::this();
    let has = |name: &[u8]| {
        // SAFETY: the symbol is looked up, not used.
        unsafe { this_process.get::<*mut c_void>(name) }.is_ok()
    };
    if !has(b"sropt\0") && !has(b"sbopt\0") && !has(b"saopt\0") {
        return None;
    }
    // SAFETY: in a program that has one of those, `opt` is the variable that holds the options. The function's type is
    // the caller's promise, and that of every release.
    unsafe {
        let options = this_process.get::<*mut c_void>(b"opt\0").ok()?.into_raw();
        let function = this_process.get::<F>(function).ok()?;
        Some((options, *function))
    }
}

/// The directory of the plugin's file.
pub fn plugin_directory() -> Option<PathBuf> {
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
    Some(Path::new(OsStr::from_bytes(name.to_bytes())).parent()?.to_owned())
}

/// Lets a descriptor pass through exec.
pub fn keep_through_exec(fd: BorrowedFd) {
    // SAFETY: clears a flag of an open descriptor.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, 0) };
}

/// Copies an array of C strings that ends after `limit` of them or with a NULL.
///
/// # Safety
/// `array` is NULL or points to such an array.
unsafe fn strings(array: *mut *mut c_char, limit: c_int) -> Vec<Vec<u8>> {
    let mut copies = Vec::new();
    for index in 0..usize::try_from(limit).unwrap_or(0) {
        if array.is_null() {
            break;
        }
        // SAFETY: by the caller's promise there is an element, because none before it was the last.
        let string = unsafe { array.add(index).read() };
        if string.is_null() {
            break;
        }
        // SAFETY: by the caller's promise a C string.
        copies.push(unsafe { CStr::from_ptr(string) }.to_bytes().to_vec());
    }
    copies
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
    let speaks = match &state::lock().meeting {
        Some(meeting) => meeting.may_speak(),
        None => spank.local_task_id().unwrap_or(0) == 0,
    };
    if speaks {
        report(failure);
    }
    // SAFETY: ends the process at once, without the exit handlers that slurmstepd has registered.
    unsafe { libc::_exit(EXIT_CANNOT_START) }
}

/// Tells the user, and Slurm's log.
fn report(failure: &Failure) {
    log_error(&failure.message);
    if let Some(hint) = &failure.hint {
        log_error(&format!("hint: {hint}"));
    }
}

fn log_error(text: &str) {
    let line = CString::new(format!("mizzen: {text}")).unwrap_or_default();
    // SAFETY: the format takes one string.
    unsafe { sys::slurm_error(c"%s".as_ptr(), line.as_ptr()) };
}

/// Tells the user something that is not an error; on a node, Slurm's log.
pub fn inform(text: &str) {
    let line = CString::new(format!("mizzen: {text}")).unwrap_or_default();
    // SAFETY: the format takes one string.
    unsafe { sys::slurm_info(c"%s".as_ptr(), line.as_ptr()) };
}

/// Tells Slurm's log, where that has details.
pub fn debug(text: &str) {
    let line = CString::new(format!("mizzen: {text}")).unwrap_or_default();
    // SAFETY: the format takes one string.
    unsafe { sys::slurm_debug(c"%s".as_ptr(), line.as_ptr()) };
}

/// Sets a variable of the client's own environment, which becomes the job's.
pub fn set_variable(name: &str, value: &str) {
    let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) else { return };
    // SAFETY: srun, sbatch and salloc set variables themselves at this time and have no other thread that reads
    // the environment yet.
    unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) };
}

/// Removes a variable from the client's own environment.
pub fn unset_variable(name: &str) {
    let Ok(name) = CString::new(name) else { return };
    // SAFETY: as for `set_variable`.
    unsafe { libc::unsetenv(name.as_ptr()) };
}
