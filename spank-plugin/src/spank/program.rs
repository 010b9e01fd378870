//! The program that has loaded the plugin, where that is srun, sbatch or salloc: its own options and variables. As the
//! user.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use mizzen_core::failure::quote;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction};

use super::{NAME, c_string, sys};

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

/// Replaces one of the program's own options, as cli_filter plugins do; false if it cannot.
pub fn set_own_option(name: &CStr, value: &[u8]) -> bool {
    type Set = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char, bool) -> c_int;
    let Ok(value) = CString::new(value) else { return false };
    // SAFETY: as above; Slurm copies the value. The last argument says that this is not the first pass over the words.
    own_options::<Set>(b"slurm_option_set\0")
        .is_some_and(|(options, set)| unsafe { set(options, name.as_ptr(), value.as_ptr(), false) } == 0)
}

/// The plugin that has taken this option's name before mizzen, if the user has given the option.
pub fn other_owner(option: &str) -> Option<String> {
    type Owner = unsafe extern "C" fn(*const c_char) -> *const c_char;
    type Given = unsafe extern "C" fn(*const c_char) -> bool;
    let name = c_string(option);
    let this_process = libloading::os::unix::Library::this();
    // SAFETY: the types of every release since 20.11. Both functions only compare the name. The owner's is a copy that
    // Slurm leaves to the caller; it is not freed, because the program knows it once and ends soon.
    let owner = unsafe {
        let given = this_process.get::<Given>(b"spank_option_isset\0").ok()?;
        let owner = this_process.get::<Owner>(b"spank_option_plugin\0").ok()?;
        if !given(name.as_ptr()) {
            return None;
        }
        let owner = owner(name.as_ptr());
        if owner.is_null() {
            return None;
        }
        CStr::from_ptr(owner)
    };
    (owner != NAME).then(|| quote(owner.to_bytes()))
}

/// Whether this program is srun.
pub fn is_srun() -> bool {
    // SAFETY: takes nothing and only reads Slurm's own state.
    unsafe { sys::spank_context() == sys::S_CTX_LOCAL }
}

/// Whether this program is salloc.
pub fn is_salloc() -> bool {
    has_symbol(b"saopt\0")
}

fn has_symbol(name: &[u8]) -> bool {
    // SAFETY: the symbol is looked up, not used.
    unsafe { libloading::os::unix::Library::this().get::<*mut c_void>(name) }.is_ok()
}

/// The options of srun, sbatch or salloc, and a function of Slurm's library for them. Both are there since 20.11; in a
/// release that had none, only what the callers do with them would be lost.
fn own_options<F: Copy>(function: &[u8]) -> Option<(*mut c_void, F)> {
    let this_process = libloading::os::unix::Library::this();
    if ![b"sropt\0", b"sbopt\0", b"saopt\0"].into_iter().any(|name| has_symbol(name)) {
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

/// Sets a variable of the client's own environment, which becomes the job's.
pub fn set_variable(name: &str, value: &str) {
    let (Ok(name), Ok(value)) = (CString::new(name), CString::new(value)) else { return };
    // SAFETY: srun, sbatch and salloc set variables themselves at this time, and what other threads they have by then
    // (srun's for signals and for messages) do not read the environment.
    unsafe { libc::setenv(name.as_ptr(), value.as_ptr(), 1) };
}

/// Removes a variable from the client's own environment.
pub fn unset_variable(name: &str) {
    let Ok(name) = CString::new(name) else { return };
    // SAFETY: as for `set_variable`.
    unsafe { libc::unsetenv(name.as_ptr()) };
}

/// The signals that end a program that somebody interrupts.
const INTERRUPTS: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// Lets signals end the program as long as this lives. srun leaves them to a thread, which does not take them yet: they are
/// blocked until then, or since 26.05 caught. Nothing is submitted, so it may end as any program does.
pub struct Interruptible {
    mask: Option<SigSet>,
    /// What the program itself does, for those that it catches.
    actions: Vec<(Signal, SigAction)>,
}

impl Interruptible {
    /// From now on.
    pub fn new() -> Interruptible {
        let mask = INTERRUPTS.into_iter().collect::<SigSet>();
        let mask = mask.thread_swap_mask(SigmaskHow::SIG_UNBLOCK).ok();
        let mut new = Interruptible { mask, actions: Vec::new() };
        new.renew();
        new
    }

    /// Once more: a thread of srun's may have begun to catch them meanwhile.
    pub fn renew(&mut self) {
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        for signal in INTERRUPTS {
            match set_action(signal, &default) {
                Ok(before) if matches!(before.handler(), SigHandler::SigIgn) => {
                    let _ = set_action(signal, &before);
                }
                Ok(before) if !matches!(before.handler(), SigHandler::SigDfl) => {
                    self.actions.push((signal, before));
                }
                _ => {}
            }
        }
    }
}

impl Drop for Interruptible {
    fn drop(&mut self) {
        if let Some(mask) = self.mask {
            let _ = mask.thread_set_mask();
        }
        for (signal, before) in &self.actions {
            let _ = set_action(*signal, before);
        }
    }
}

fn set_action(signal: Signal, action: &SigAction) -> nix::Result<SigAction> {
    // SAFETY: the kernel's own action, or one that the program has had: no code of ours becomes a handler.
    unsafe { sigaction(signal, action) }
}
