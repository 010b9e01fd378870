//! What Slurm tells a hook through its handle, and what a hook can tell Slurm.

use std::ffi::{CStr, CString, OsString, c_char, c_int};
use std::os::unix::ffi::OsStringExt;

use mizzen_core::settings::Argument;
use mizzen_core::slurm_options::OptionSpec;
use mizzen_core::{Failure, Variables};

use super::{c_string, option_callback, sys};

/// Slurm's handle, valid during one hook.
pub struct Spank(pub(super) sys::spank_t);

impl Spank {
    /// Adds the option with this index in [`options::ALL`].
    pub fn register_option(&self, index: usize, spec: &OptionSpec) -> Result<(), Failure> {
        let (has_arg, argument) = match spec.argument {
            Argument::No => (0, None),
            Argument::Required(name) => (1, Some(c_string(name))),
            Argument::Optional(name) => (2, Some(c_string(name))),
        };
        let (name, usage) = (c_string(&spec.name), c_string(&format!("[mizzen] {}", spec.help)));
        let mut option = sys::spank_option {
            name: name.as_ptr().cast_mut(),
            arginfo: argument.as_ref().map_or(std::ptr::null_mut(), |argument| argument.as_ptr().cast_mut()),
            usage: usage.as_ptr().cast_mut(),
            has_arg,
            val: index as c_int,
            cb: Some(option_callback),
        };
        // SAFETY: the handle is Slurm's own; Slurm copies the option and does not write to its strings.
        let code = unsafe { sys::spank_option_register(self.0, &raw mut option) };
        if code == 0 {
            return Ok(());
        }
        // Not if another plugin has the name already: `options::refuse_taken`.
        Err(Failure::new(format!("Slurm refuses the option --{} (spank_option_register: {code})", spec.name)))
    }

    /// A variable of the job's environment; in slurmstepd and its tasks.
    pub fn job_variable(&self, name: &str) -> Result<Option<Vec<u8>>, Failure> {
        let found = self.job_environment()?.find(|(known, _)| *known == name.as_bytes());
        Ok(found.map(|(_, value)| value.to_vec()))
    }

    /// The variables of the job that stand for options.
    pub fn job_variables(&self) -> Result<Variables, Failure> {
        Ok(Variables::of(self.job_environment()?))
    }

    /// Names and values of the job's environment.
    fn job_environment(&self) -> Result<impl Iterator<Item = (&[u8], &[u8])>, Failure> {
        let mut environment: *mut *mut c_char = std::ptr::null_mut();
        // SAFETY: for S_JOB_ENV Slurm expects a char ***, and gives its own array, ended by NULL.
        let code = unsafe { sys::spank_get_item(self.0, sys::S_JOB_ENV, &raw mut environment) };
        if code != 0 || environment.is_null() {
            return Err(Failure::new(format!(
                "Slurm does not tell the job's environment (spank_get_item: {code})"
            )));
        }
        // SAFETY: see above; nothing changes the array while the iterator is in use.
        let variables = unsafe { elements(environment, c_int::MAX) };
        Ok(variables.filter_map(|variable| {
            let text = variable.to_bytes();
            let equals = text.iter().position(|byte| *byte == b'=')?;
            Some((&text[..equals], &text[equals + 1..]))
        }))
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

    /// `JOB.STEP`, as Slurm's commands name it.
    pub fn step_name(&self) -> Option<String> {
        let job: u32 = self.number(sys::S_JOB_ID, 0)?;
        Some(match self.step()? {
            Step::Number(number) => format!("{job}.{number}"),
            Step::Batch => format!("{job}.batch"),
            Step::Interactive => format!("{job}.interactive"),
            Step::Extern => format!("{job}.extern"),
        })
    }

    /// How many nodes the step has.
    pub fn node_count(&self) -> Option<u32> {
        self.number(sys::S_JOB_NNODES, 0)
    }

    /// Which of them this one is.
    pub fn node_index(&self) -> Option<u32> {
        self.number(sys::S_JOB_NODEID, 0)
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

    /// Sets a variable of the task. What has the value already is left alone: Slurm clears 256 KiB for each call.
    pub fn set_job_variable(&self, name: &str, value: &str) -> Result<(), Failure> {
        if self.job_variable(name).is_ok_and(|known| known.as_deref() == Some(value.as_bytes())) {
            return Ok(());
        }
        let text = |text: &str| CString::new(text).map_err(|_| Failure::new(format!("NUL in {name}")));
        let (name_text, value) = (text(name)?, text(value)?);
        // SAFETY: Slurm copies both strings.
        match unsafe { sys::spank_setenv(self.0, name_text.as_ptr(), value.as_ptr(), 1) } {
            0 => Ok(()),
            code => Err(Failure::new(format!("Slurm refuses the variable {name} (spank_setenv: {code})"))),
        }
    }

    /// sbatch: has a variable `SLURM_SPANK_` with this name put into the job's environment, whatever else is in it.
    pub fn set_job_control_variable(&self, name: &str, value: &str) -> Result<(), Failure> {
        let text = |text: &str| CString::new(text).map_err(|_| Failure::new(format!("NUL in {name}")));
        let (name_text, value) = (text(name)?, text(value)?);
        // SAFETY: Slurm copies both strings.
        match unsafe { sys::spank_job_control_setenv(self.0, name_text.as_ptr(), value.as_ptr(), 1) } {
            0 => Ok(()),
            code => {
                let message = format!("Slurm refuses the variable {name} (spank_job_control_setenv: {code})");
                Err(Failure::new(message))
            }
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
    pub fn replace_program(&self, launcher: &CStr) -> Result<Option<OsString>, Failure> {
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

/// The strings of an array that ends after `limit` of them or with a NULL.
///
/// # Safety
/// `array` is NULL or points to such an array of C strings, which stays as it is while they are used.
unsafe fn elements<'a>(array: *mut *mut c_char, limit: c_int) -> impl Iterator<Item = &'a CStr> {
    let limit = if array.is_null() { 0 } else { usize::try_from(limit).unwrap_or(0) };
    // SAFETY: by the caller's promise there is an element, because none before it was the last.
    let all = (0..limit).map(move |index| unsafe { array.add(index).read() });
    // SAFETY: by the caller's promise a C string.
    all.take_while(|string| !string.is_null()).map(|string| unsafe { CStr::from_ptr(string) })
}

/// Copies of them.
///
/// # Safety
/// As for `elements`.
pub(super) unsafe fn strings(array: *mut *mut c_char, limit: c_int) -> Vec<Vec<u8>> {
    // SAFETY: by the caller's promise.
    unsafe { elements(array, limit) }.map(|string| string.to_bytes().to_vec()).collect()
}
