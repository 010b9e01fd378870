//! What to do about messages beside which the sources do not say it: those without a hint, and those whose hint is chosen by an
//! error of the kernel.

use super::found::Message;

const IMPORT_AGAIN: &str =
    "the image is broken or was not copied completely; copy it again, or make it again";
const WRONG_ANSWER: &str =
    "the registry or something in front of it answers wrongly; try again, then tell who runs it";
const NETWORK: &str = "the network or the registry; try again: what was fetched is kept";
const SPECIFICATION: &str = "the file in /etc/cdi or /run/cdi that the message names is wrong: have its generator write it anew (nvidia-ctk cdi generate)";
const ARCHIVE: &str = "the archive or directory is not what its maker wrote; make it again, or copy it again";
const RULE: &str =
    "correct the file in /etc/mizzen/host.d that the message names; docs/gpu-and-fabric.md explains its keys";
const VERSIONS: &str = "plugin and launcher must be of the same version on every node";

/// A message as the page has it, or its beginning before a `*`, and what to do or what it means.
const REMEDIES: &[(&str, &str)] = &[
    // Options, variables and requests.
    ("\"…\" has no digest", "name it without @sha256:"),
    ("\"…\" is neither yes nor no", "write yes or no"),
    ("\"…\" is not a digest", "write sha256: and 64 hexadecimal digits"),
    ("\"…\" is not absolute", "write the whole path, beginning with /"),
    ("\"…\" is not yes, no or debug", "write the option alone, or --container-verbose=debug"),
    ("\"…\" is there twice", VERSIONS),
    ("\"…\": the name is not UTF-8", "rename it"),
    (
        "Slurm *",
        "mizzen does not fit this Slurm, or Slurm has run out of memory; give your administrator the line of slurmd's log",
    ),
    ("a reference and the digest of a file", VERSIONS),
    ("bad escape in \"…\"", VERSIONS),
    (
        "cannot find the current directory",
        "the directory has been removed, or you may not search those above it; go to another one",
    ),
    ("mode=… is not an octal mode", "write mode= with digits from 0 to 7, as mode=1777"),
    ("the answer of … cannot be used: …", "mizzen and mizzen-import must be of the same version"),
    (
        "the broadcast of the image was interrupted",
        "you, or an administrator, ended srun; nothing was started",
    ),
    (
        "the image's name has … bytes, more than the … of a path: …",
        "use a shorter path, for example through a symbolic link",
    ),
    ("the step has no channel", VERSIONS),
    ("too long: … bytes", VERSIONS),
    (
        "… was interrupted by signal …",
        "you, or the machine's administrator, ended it; what was fetched is kept",
    ),
    (
        "… failed with exit code …",
        "the lines above say why; without any, mizzen and mizzen-import must be of the same version",
    ),
    // The site's configuration.
    ("\"…\" is not the name of a hook", "write the file name of a hook's program, as nvidia-ctk"),
    ("a network device without a name", SPECIFICATION),
    ("cdiVersion *", SPECIFICATION),
    ("device node*", SPECIFICATION),
    ("hook*", SPECIFICATION),
    ("it has no devices", SPECIFICATION),
    ("it has two devices \"…\"", SPECIFICATION),
    ("it is nested more than … levels deep", SPECIFICATION),
    ("mount on *", SPECIFICATION),
    ("mount: … is not an absolute path", SPECIFICATION),
    ("variable … is not NAME=VALUE", SPECIFICATION),
    ("… is not a kind of devices like \"vendor.com/class\"", SPECIFICATION),
    ("choice: there is no set \"…\"", RULE),
    ("when: empty, so the rule never holds", RULE),
    (
        "image_store: \"…\" is not a user's name",
        "ask the administrator: the account has no name that can be part of a path",
    ),
    (
        "the node has no …",
        "--container-mpi=image uses the image's own; an MPI module of the node may have to be loaded first",
    ),
    (
        "the node's … (…) does not fit the image: …",
        "use an image with a newer C library, or --container-mpi=image or --container-fabric=image",
    ),
    (
        "the node's … needs glibc, which the image does not have",
        "use an image with glibc (Debian, Ubuntu, Rocky …), not with musl (Alpine)",
    ),
    ("… has just vanished", "somebody changes the files; run it again"),
    ("…: cannot list it", "all users must be able to read the directory: chmod a+rx"),
    (
        "…: is a symbolic link; mizzen reads only the file itself",
        "put the file itself there, or name what the link leads to",
    ),
    ("…: is not an absolute path", "write the whole path, beginning with /"),
    ("…: no such file", "the file must be there on this machine, too"),
    // Images.
    (
        "/.singularity.d/env in the image has … scripts, more than …",
        "the image is broken or hostile; make it again",
    ),
    ("the image's environment has *", "make the image again with fewer or shorter variables"),
    ("…: a big-endian squashfs *", "make the image again with mksquashfs 4"),
    ("…: squashfs *", "make the image again with mksquashfs 4"),
    ("…: compressed with method *", "make the image again with mksquashfs 4"),
    ("…: a file of … bytes *", IMPORT_AGAIN),
    ("…: corrupt image: *", IMPORT_AGAIN),
    ("…: truncated: *", IMPORT_AGAIN),
    ("…: not a squashfs image: *", IMPORT_AGAIN),
    ("…: reading the image at byte …: …", "its file system fails; the node's kernel log tells more"),
    (
        "…: the image has become shorter: *",
        "somebody has written into it: put a new image in its place with mv",
    ),
    ("…: no such file in the image", IMPORT_AGAIN),
    ("…: not a directory in the image", IMPORT_AGAIN),
    ("…: not a regular file in the image", IMPORT_AGAIN),
    ("…: not a symbolic link in the image", IMPORT_AGAIN),
    ("…: too many levels of symbolic links in the image", IMPORT_AGAIN),
    ("…: is a directory", "name a file"),
    ("…: not a name in a registry: not UTF-8", "write docker://HOST[:PORT]/NAME:TAG"),
    ("…: not docker:// or oras://", "write docker://HOST[:PORT]/NAME:TAG"),
    (
        "…: the digest is not sha256: and 64 hexadecimal digits",
        "copy the digest whole; `mizzen inspect` and `mizzen images` show it",
    ),
    // Environment files.
    (
        "control character in \"…\"",
        "a newline at the end often comes from $(command) or a file edited elsewhere",
    ),
    // Copies.
    ("\"…\" is not auto, always, never or bcast", "write one of these words"),
    ("a directory has no digest", "name it without @sha256:, or pack it into a squashfs file"),
    ("no copy for all users: …", "the reason follows; users then have copies of their own"),
    (
        "… is not root's alone (uid …, mode …)",
        "chown root and chmod go-w, or name another directory in mizzen.toml",
    ),
    (
        "…: belongs to uid …, not to you",
        "another user has made it; the administrator can remove it, or name another stage_directory",
    ),
    ("…: something is mounted there", "the administrator must unmount it, or name another stage_directory"),
    // Starting the container.
    (
        "a container needs 64 MiB of memory to start",
        "raise `ulimit -v` and `ulimit -d`, for a job before it is submitted",
    ),
    ("not an image", "only mizzen writes this file; remove the container with `mizzen containers remove`"),
    ("only a container with a name can be saved so", "`enroot list` shows the containers that have one"),
    (
        "link …: the image has a directory there",
        "a CDI specification asks for this link: use another image, or name its hook in cdi_leave_out_hooks of mizzen.toml",
    ),
    ("cannot bring up the loopback", "leave net out of --container-unshare"),
    ("cannot mount *", "`mizzen doctor` on the node tells what works there"),
    ("cannot write /proc/self/*", "`mizzen doctor` on the node tells whether user namespaces work there"),
    ("enroot start --*", "leave the option out; docs/from-pyxis.md has what is known of enroot"),
    (
        "the file server has ended",
        "a message of its watcher says why; without one, slurmd's log or the kernel's tells",
    ),
    (
        "… in the container",
        "the reason follows; another mount may hide the place, or it belongs to another user",
    ),
    ("…: cannot lock it", "the directory of copies must be on a local disk: stage_directory in mizzen.toml"),
    (
        "…: is a symbolic link to nothing in the container",
        "mount the directory that it leads to, or name the program itself",
    ),
    // Slurm's commands inside.
    (
        "no Slurm commands in the container: *",
        "srun, sbatch and so on fail inside; the program itself runs. The reason is often a limit (ulimit -u, ulimit -n)",
    ),
    (
        "the helper did not understand: …",
        "mizzen inside and outside must be of the same version: start the step again",
    ),
    ("…: cannot be started on …", "it is Slurm's own command there; the reason follows"),
    (
        "cannot hand it to the helper outside the container",
        "it lives as long as the program that the container was started for; start the step again",
    ),
    // Registries.
    ("\"…\" is not a host", "write HOST or HOST:PORT, without https://"),
    (
        "\"…\" is not the name of a credential helper",
        "correct credHelpers or credsStore in the file of credentials",
    ),
    (
        "cannot find …: it has no address",
        "is the name right? without a way to the internet, HTTPS_PROXY names a proxy",
    ),
    ("it has no address", "is the name right? without a way to the internet, HTTPS_PROXY names a proxy"),
    (
        "cannot read the certificates",
        "ca_file in mizzen.toml or SSL_CERT_FILE must name a file that you can read",
    ),
    ("interrupted: there is no login", "you ended it; nothing was stored"),
    ("not a file of credentials: *", "correct the file, or move it away and run `mizzen login` again"),
    (
        "there is nobody to ask",
        "on a terminal run `mizzen login`; elsewhere give the password with --password-stdin",
    ),
    ("the connection was lost*", NETWORK),
    ("it sends nothing any more", NETWORK),
    ("no answer within … s", NETWORK),
    ("it has sent … bytes in … s, which is too slow", NETWORK),
    ("its answer is not understood", WRONG_ANSWER),
    ("…: it sends *", WRONG_ANSWER),
    ("…: it has more than *", WRONG_ANSWER),
    ("…: more than … redirects", WRONG_ANSWER),
    ("…: the answer to the request for a token is not understood", WRONG_ANSWER),
    ("…: there is no token in the answer to the request for one", WRONG_ANSWER),
    ("…: neither https:// nor http://", WRONG_ANSWER),
    ("…: http after https, which is refused", WRONG_ANSWER),
    ("… is …, where a registry must not send us", WRONG_ANSWER),
    (
        "the manifest does not say where else this layer is",
        "have the image's maker push its layers, or import it from `docker save`",
    ),
    (
        "it wants a certificate of ours, and mizzen has none",
        "mizzen has no certificates of clients; use a registry or a mirror without",
    ),
    ("its certificate is for another name", "use the name that its certificate has"),
    // Importing and exporting.
    ("\"…\" is not a digest: *", "copy the digest whole"),
    (
        "/.mizzen/config.json in the image is damaged: …",
        "the program that makes the image writes this file; make the image again",
    ),
    ("a symbolic link on its path leads back to itself", ARCHIVE),
    ("a whiteout of a name that no file has", ARCHIVE),
    ("index.json is a manifest, and not an index", ARCHIVE),
    ("its index contradicts itself", ARCHIVE),
    ("manifest.json *", ARCHIVE),
    ("no index.json: not an OCI layout", ARCHIVE),
    ("the image's configuration is damaged: …", ARCHIVE),
    ("the root of the image is not a directory", ARCHIVE),
    ("… is not a layer", ARCHIVE),
    ("…: is not as it was written", "somebody has changed it meanwhile; remove the file and import it again"),
    ("not the name of an image in a registry", "write docker://NAME"),
    (
        "too many small files for an archive of an image",
        "it is none; if it is, write it to a file and import that",
    ),
    ("… of … images could not be looked up", "the lines above say which and why; the others are up to date"),
    (
        "…: cannot open the image store",
        "it must be a directory of yours: image_store in mizzen.toml, or XDG_DATA_HOME, names it",
    ),
    (
        "…: the image store is not a directory",
        "image_store in mizzen.toml, or XDG_DATA_HOME, names the directory",
    ),
    ("…: the image is gone", "it was removed meanwhile; import it again"),
    ("…: is a …, and no file can take its place", "-o names another file"),
    ("…: the archive *", ARCHIVE),
    ("…: has a PAX record *", ARCHIVE),
    ("…: has a map of a sparse file *", ARCHIVE),
    ("…: has a wrong checksum: *", ARCHIVE),
    ("…: has no valid number for the *", ARCHIVE),
    ("…: is longer than … bytes with its extensions", ARCHIVE),
    ("…: is of the unknown type *", ARCHIVE),
    ("…: stands behind a block of zeros*", ARCHIVE),
    ("…: the header at byte *", ARCHIVE),
    ("…: the sparse file *", ARCHIVE),
    // Notes.
    (
        "a CDI specification of this node is not used: …",
        "the reason follows; the administrator has it written anew",
    ),
    (
        "every rank has a container of its own: …",
        "MPI then copies data twice between ranks; give --share=NAME, or mend the reason that follows",
    ),
    (
        "files of these groups belong to nobody inside: …*",
        "docs/admins.md explains the two reasons (\"When something is wrong\")",
    ),
    (
        "no current directory; the program starts in …",
        "the directory was removed; --container-workdir names another one",
    ),
    (
        "the container \"…\" is being started or removed by process …; waiting for it",
        "another step or command of yours has the container; it goes on by itself",
    ),
    ("the container \"…\" runs already: ignoring *", "these options act only when a container is started"),
    (
        "the image keeps its own MPI: …",
        "the reason follows; the site asked for the node's MPI, which does not fit",
    ),
    (
        "the image's Open MPI has PMIx *",
        "use an image with a newer Open MPI, or start the ranks with another --mpi",
    ),
    (
        "the node's … is left out: …",
        "the image is too old or too different for the node's library; use a newer image",
    ),
    ("the site's copies are not used: …", "a copy of your own is made; tell the administrator the reason"),
    ("… is a symbolic link to …, which is not in the container", "mount the directory that it leads to"),
    ("… is being copied to the node by …", "this step waits for that copy"),
    ("… is left out: *", "choose a mount point below no other mount, or make it on the host first"),
    (
        "the link … is not made: the container that runs has a file there",
        "a CDI specification asks for this link; start a container of another name",
    ),
    ("the link … is left out: *", "choose a mount point below no other mount, or make it on the host first"),
    (
        "… is not in the container; the program starts in …",
        "mount the current directory, or choose --container-workdir",
    ),
    (
        "… is not sent to the nodes, which copy it themselves: …",
        "the job runs all the same; the reason follows",
    ),
    (
        "… is used where it is: …",
        "no copy could be made, for the reason that follows; the job runs all the same",
    ),
    ("… … knows ranks by their user id alone *", "leave --container-remap-root out"),
    ("… … takes ranks that are root inside *", "leave --container-remap-root out"),
    ("…: cannot remember the copy: …", "it is made again by the next start; is the node's disk full?"),
    ("…: everybody can write to it*", "others can change the image while programs run from it"),
    (
        "…: its copy on the node is damaged: …",
        "the node's disk has lost something; the copy has been made again",
    ),
    (
        "…: its copy on the node is not completed: *",
        "the disk could not write the copy, or the original was moved, linked or given another mode meanwhile; the job goes on",
    ),
    ("…: the site's copy … is not used: …", "a copy of your own is made; tell the administrator the reason"),
    ("…: what srun has sent cannot be used: …", "the node copies the image itself"),
    ("…: … is mounted twice; the last one holds", "leave one of the two mounts out"),
    (
        "…: … is too long to reach the new step",
        "a step inside does not get this variable; write its value into a file",
    ),
    ("…: …; it is left out (nofail)", "the source of a mount with the flag nofail is not there"),
    (
        "…: not understood; the variable that it sets is missing",
        "set it with --container-env, or with ENV in the image's Dockerfile",
    ),
    ("…: umount:…: nothing is mounted there", "leave it out: nothing would be mounted there anyway"),
    ("left out: /… and … more (…)", "the archive does not have these files"),
];

/// Hints that are chosen by the kernel's error: the part of the list, the message, the hint.
const ERRORS: &[(&str, &str, &str)] = &[
    (
        OPTIONS,
        "SLURM_MIZZEN_REQUEST: bad escape in \"…\"",
        "only mizzen sets this variable; unset it, and check that all nodes have the same mizzen",
    ),
    (OPTIONS, "SLURM_MIZZEN_HANDOVER: bad escape in \"…\"", VERSIONS),
    (
        OPTIONS,
        "…: the name begins with a dot, or is longer than 200 bytes, or has a / or a colon",
        "a name is letters, digits, - and _, as train or pytorch-2",
    ),
    (
        OPTIONS,
        "…: a container that is wanted is not named",
        "write image = \"…\" in it, name a base_environment that does, or give --container-image",
    ),
    (
        LIMITS,
        "…: Too many open files",
        "your limit on open files: ulimit -n is …; `ulimit -n …` raises it, for a job before it is submitted",
    ),
    (
        LIMITS,
        "…: Too many open files in system",
        "the node's limit on open files is reached (sysctl fs.file-max = …)",
    ),
    (
        LIMITS,
        "…: Resource temporarily unavailable",
        "the cgroup … may have … processes (pids.max), and has them: you run too many at once there",
    ),
    (
        LIMITS,
        "…: Resource temporarily unavailable",
        "your limit on processes: ulimit -u is …; `ulimit -u …` raises it, for a job before it is submitted",
    ),
    (
        LIMITS,
        "…: Resource temporarily unavailable",
        "the node's limit on processes is reached (sysctl kernel.pid_max = …)",
    ),
    (
        LIMITS,
        "…: Cannot allocate memory",
        "your limit on address space: ulimit -v is … KiB; `ulimit -v …` raises it, for a job before it is submitted",
    ),
    (
        LIMITS,
        "…: Cannot allocate memory",
        "your limit on data: ulimit -d is … KiB; `ulimit -d …` raises it, for a job before it is submitted",
    ),
    (
        LIMITS,
        "…: File too large",
        "your limit on the size of files: ulimit -f is … KiB; `ulimit -f …` raises it, for a job before it is submitted",
    ),
    (
        LIMITS,
        "…: Argument list too long",
        "your limit on the stack, a quarter of which is for arguments and variables: ulimit -s is … KiB",
    ),
    (
        CONFIGURATION,
        "mizzen.toml: …: Permission denied",
        "all users must be able to search the directories above it: chmod a+x",
    ),
    (CONFIGURATION, "… belongs to uid …, or … can be written by others", "chown root and chmod go-w …"),
    (
        CONFIGURATION,
        "…: it is on a file system that a user serves",
        "only root may be able to say what is in it",
    ),
    (
        CONFIGURATION,
        "/etc/mizzen/host.d/…: what is not a rule",
        "docs/gpu-and-fabric.md explains the keys of these files",
    ),
    (
        CONFIGURATION,
        "owners of this site's policy do not include a file of another mount namespace",
        "name the file by its path, and not by one of another process (/proc/PID/root)",
    ),
    (
        CONFIGURATION,
        "--container-mpi: …, and the node's MPI cannot be used",
        "…=image uses the image's own; to use the node's, the program must be built for an MPI of its family",
    ),
    (
        IMAGES,
        "IMAGE: No such file or directory",
        "it is a symbolic link to …, which is not there on this node",
    ),
    (IMAGES, "IMAGE: No such file or directory", "the directory … does not exist on this node"),
    (
        IMAGES,
        "IMAGE: No such file or directory",
        "this node does not have the file; put it on a file system that all nodes of the job share",
    ),
    (IMAGES, "IMAGE: No such file or directory", "an image in a registry is written docker://NAME"),
    (
        IMAGES,
        "IMAGE: Permission denied",
        "you need read permission for it and x for every directory above it",
    ),
    (IMAGES, "IMAGE: Too many levels of symbolic links", "a symbolic link on this path leads back to itself"),
    (IMAGES, "IMAGE: Not a directory", "a file stands where the path needs a directory"),
    (IMAGES, "IMAGE: Stale file handle", "it was replaced on the file server; try again"),
    (
        ENVIRONMENT,
        "FILE.toml:LINE: what is not TOML, as a bracket that is not closed or a key that is there twice",
        "environment files are TOML",
    ),
    (
        ENVIRONMENT,
        "NAME.toml: Permission denied, or No such file or directory",
        "it must be there, and you must be able to see it",
    ),
    (START, "PROGRAM: Permission denied", "is it executable (chmod +x)?"),
    (START, "PROGRAM: Permission denied", "its file system is mounted noexec"),
    (START, "PROGRAM: Permission denied", "a directory on its path is closed to you"),
    (
        START,
        "PROGRAM: Input/output error",
        "a part of the image cannot be read; copy the image again, or make it again",
    ),
    (
        START,
        "PROGRAM: Too many levels of symbolic links",
        "a symbolic link in the container leads back to itself",
    ),
    (
        START,
        "--writable: cannot mount tmpfs: Invalid argument",
        "\"…\" must be a number of bytes with k, m, g or % behind it",
    ),
    (START, "--save or --container-save: Permission denied", "nobody but you can make a file in it for you"),
    (START, "the container \"…\" runs, but cannot be entered: …", "wait until the programs in it have ended"),
    (START, "mizzen doctor: openat2: Function not implemented", "Linux 5.6 has it; mizzen does without"),
    (
        START,
        "mizzen doctor: mount_setattr: Function not implemented",
        "Linux 5.12 has it; mizzen does without",
    ),
    (
        START,
        "mizzen doctor: … names …/spank_mizzen.so: No such file or directory",
        "every srun and job fails here until the file is there, or the line is gone",
    ),
    (
        START,
        "mizzen doctor: stage_directory: …: not a directory, or users cannot write there",
        "make it a directory with mode 1777, or name another in mizzen.toml",
    ),
    (
        START,
        "mizzen doctor: stage_shared: …: others than root can change it, or one of the directories above it",
        "no start uses the copies in it: make it root's, with mode 0755, and all directories above it",
    ),
    (START, "enroot remove: …", "`enroot list -f` shows what there is, and what runs"),
    (START, "ENROOT_…: \"…\" is neither yes nor no", "write yes or no"),
    (START, "man pages: …: Permission denied", "give a directory that you can write"),
    (
        IMPORT,
        "writing it: No space left on device",
        "the file system is full; make room, or choose another one",
    ),
    (
        IMPORT,
        "writing it: Disk quota exceeded",
        "your quota is used up; remove something (`mizzen cache prune` removes layers), or choose another file system",
    ),
    (IMPORT, "writing it: File too large", "the limit on file sizes is too small: see `ulimit -f`"),
    (IMPORT, "/… in it: unexpected end of file", "somebody changes it; try again"),
    (
        IMPORT,
        "the layer cache: … is not safe from other users",
        "XDG_CACHE_HOME must name a directory that is yours, below directories in which nobody else can replace it",
    ),
];

const OPTIONS: &str = "Options, variables and requests";
const CONFIGURATION: &str = "The site's configuration";
const IMAGES: &str = "Finding and reading images";
const ENVIRONMENT: &str = "Environment files";
const START: &str = "Starting the container";
const LIMITS: &str = START;
const IMPORT: &str = "Importing, exporting and the image store";

/// What to do about a message, with the pattern that means it.
pub fn of(text: &str) -> Option<&'static (&'static str, &'static str)> {
    let means = |pattern: &str| match pattern.strip_suffix('*') {
        Some(beginning) => text.starts_with(beginning),
        None => text == pattern,
    };
    REMEDIES.iter().find(|(pattern, _)| means(pattern))
}

/// All patterns.
pub fn patterns() -> impl Iterator<Item = &'static str> {
    REMEDIES.iter().map(|(pattern, _)| *pattern)
}

/// The messages that end in an error of the kernel or of a parser, in this part of the list.
pub fn of_errors(part: &str) -> Vec<Message> {
    let mut found: Vec<Message> = Vec::new();
    for (_, text, hint) in ERRORS.iter().filter(|(title, ..)| *title == part) {
        let hint = (*hint).to_owned();
        match found.iter_mut().find(|message| message.text == *text) {
            Some(message) => message.hints.push(hint),
            None => found.push(Message { text: (*text).to_owned(), hints: vec![hint], is_note: false }),
        }
    }
    found
}
