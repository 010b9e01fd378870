//! The documents are true: their links lead somewhere, the list of messages is that of the sources, and every command in
//! them runs on a cluster and prints what they say. CONTRIBUTING.md ("Documents") explains the words behind the fences.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use mizzen_tests::check::assert_out;
use mizzen_tests::documents::{Block, Page, matches};
use mizzen_tests::examples::Example;
use mizzen_tests::images::{ImageTree, mpi, mpi_rootfs};
use mizzen_tests::registry::{ClusterRegistry, Layout, LocalRegistry};
use mizzen_tests::release::mpirun_rootfs;
use mizzen_tests::{Cluster, Release, Spec, User, messages, record, repository, run_tool};

/// Why a command may stay untried: what it needs that no cluster of ours has.
const REASONS: [&str; 8] = ["docker", "gpu", "image", "internet", "jupyter", "mpi", "packages", "sources"];

/// Docker Hub, and what the pages take from it, are on the login node.
const TOML: &str = "[registries.\"docker.io\"]\nmirrors = [\"http://ctl:5000\"]\n";

#[test]
fn every_link_leads_somewhere() {
    let pages = Page::all().unwrap();
    for page in &pages {
        for (line, link) in page.links().unwrap() {
            if link.starts_with("https://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => page.path.clone(),
                file => page.path.parent().unwrap_or(Path::new("")).join(file),
            };
            let place = format!("{}:{line}: {link}", page.path.display());
            assert!(repository().join(&target).exists(), "{place}");
            // The book has only the pages in docs.
            let leaves = page.path.starts_with("docs") && Path::new(file).starts_with("..");
            assert!(!leaves, "{place}: not in the book");
            // Pages that include another one have its headings.
            let included = [("docs/security.md", "SECURITY.md"), ("docs/contributing.md", "CONTRIBUTING.md")];
            let source = included.iter().find(|(page, _)| Path::new(page) == target);
            let source = source.map_or(target.clone(), |(_, source)| source.into());
            let found = anchor.is_empty() || Page::read(source).unwrap().anchors().unwrap().contains(anchor);
            assert!(found, "{place}");
        }
    }
}

#[test]
fn the_book_has_every_page() {
    let summary = Page::read("docs/SUMMARY.md").unwrap();
    let listed: BTreeSet<String> = summary.links().unwrap().into_iter().map(|(_, link)| link).collect();
    let names = Page::all().unwrap().into_iter().filter_map(|page| {
        let name = page.path.strip_prefix("docs").ok()?.to_str()?.to_owned();
        (name != "SUMMARY.md").then_some(name)
    });
    assert_eq!(listed, names.collect::<BTreeSet<String>>());
}

#[test]
fn the_list_of_messages_is_that_of_the_sources() {
    let made = messages::page(&repository()).unwrap();
    let page = Page::read("docs/messages.md").unwrap();
    let stale: Vec<&str> = page.text.lines().filter(|line| !made.contains(line)).collect();
    let missing: Vec<&str> = made.lines().filter(|line| !page.text.contains(line)).collect();
    assert!(
        made == page.text,
        "docs/messages.md is made by `cargo run -p mizzen-tests -- messages`; it lacks {missing:#?} and has {stale:#?}"
    );
}

/// Who pastes the message that they got into the page's search finds it: so do those who paste one of the tables of other pages.
#[test]
fn the_list_of_messages_has_those_of_the_other_pages() {
    // Slurm's own lines, and what is told in its log or is a part of a hint.
    const ELSEWHERE: [&str; 4] = [
        "salloc: error: --container requires LaunchParameters=use_interactive_step",
        "Incompatible Slurm plugin … version",
        "--container is run by Slurm itself here (oci.conf)",
        "mizzen.toml:3: unknown field …",
    ];
    let page = Page::read("docs/messages.md").unwrap().text;
    let page = page.replace('\\', "").replace("&lt;", "<");
    let entries: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("- ").or(line.strip_prefix("| ")))
        .flat_map(|line| line.split(" | ").next().unwrap().split("<br>"))
        .filter(|entry| !["message", "note", "---|---|"].contains(entry))
        .collect();
    for entry in &entries {
        let words = entry.split_whitespace().count();
        assert!(words > 2 && !entry.ends_with(": "), "docs/messages.md has a part of a message: {entry}");
    }
    let mut missing = Vec::new();
    let mut seen = 0;
    for name in ["docs/users.md", "docs/admins.md", "docs/images.md"] {
        let text = Page::read(name).unwrap().text;
        let tables = text.split("\n| message |").skip(1);
        for row in tables.flat_map(|table| table.lines().skip(2).take_while(|line| line.starts_with("| "))) {
            let cell = row.trim_start_matches("| ").replace("\\|", "¦");
            let cell = cell.split(" | ").next().unwrap().replace('¦', "|");
            for message in cell.split('`').skip(1).step_by(2).filter(|message| !ELSEWHERE.contains(message)) {
                seen += 1;
                if !is_listed(message, &page, &entries) {
                    missing.push(format!("{name}: {message}"));
                }
            }
        }
    }
    assert!(seen > 40, "{seen}");
    assert!(missing.is_empty(), "docs/messages.md lacks {missing:#?}");
}

/// Whether the list has a message: all that does not differ in it, or an entry that it is an example of.
fn is_listed(message: &str, page: &str, entries: &[&str]) -> bool {
    let differs = |word: &str| ["X", "Y", "N", "M", "HOST"].contains(&word.trim_end_matches([':', ',']));
    let words = message.trim_start_matches("hint: ").split(' ');
    let words: Vec<String> =
        words
            .map(|word| {
                if differs(word) { word.replace(|c: char| c.is_alphabetic(), "…") } else { word.to_owned() }
            })
            .collect();
    let message = words.join(" ").trim_start_matches("…: ").to_owned();
    let mut parts =
        message.split('…').map(|part| part.trim_matches([' ', ':', ',', ';'])).filter(|part| part.len() > 3);
    // In front of an entry may stand what it is about, and behind it the kernel's reason.
    let (without_reason, _) = message.rsplit_once(": ").unwrap_or((&message, ""));
    let is_example = |entry: &str| {
        let shapes = [entry, entry.trim_start_matches("…: ")];
        let texts = [message.as_str(), message.trim_end_matches([' ', '…']), without_reason];
        shapes.iter().any(|shape| texts.iter().any(|text| matches(shape, text)))
    };
    parts.all(|part| page.contains(part)) || entries.iter().any(|entry| is_example(entry))
}

/// The last column of the glossary names files and directories of the sources, or names in them.
#[test]
fn the_glossary_names_what_there_is() {
    let page = Page::read("docs/glossary.md").unwrap();
    let rows = page.text.lines().filter(|line| line.starts_with("| ") && line.matches(" | ").count() == 2);
    let places: Vec<&str> = rows
        .filter_map(|row| row.trim_end_matches(" |").rsplit(" | ").next())
        .flat_map(|places| places.split('`').skip(1).step_by(2))
        .collect();
    assert!(places.len() > 60, "{places:?}");
    // The first of several in a row has the directory of the others.
    let mut directory = repository();
    for place in places {
        if place.contains('/') || place.ends_with(".rs") {
            let found =
                [repository().join(place), directory.join(place)].into_iter().find(|path| path.exists());
            let found = found.unwrap_or_else(|| panic!("docs/glossary.md: {place} is not there"));
            directory = found.parent().unwrap().to_owned();
        } else {
            let name = place.rsplit("::").next().unwrap();
            let declared = [format!("fn {name}("), format!("struct {name}"), format!("enum {name}")];
            let mut sources = Vec::new();
            for part in ["core/src", "launcher/src", "import/src", "squashfs/src", "spank-plugin/src"] {
                messages::rust_files(&repository().join(part), &mut sources).unwrap();
            }
            let is_declared = |file: &std::path::PathBuf| {
                let text = fs::read_to_string(file).unwrap();
                declared.iter().any(|declared| text.contains(declared))
            };
            assert!(sources.iter().any(is_declared), "docs/glossary.md: {place} is declared nowhere");
        }
    }
}

/// The picture in README.md has the commands of the recording program, and what they print today.
#[test]
fn the_picture_shows_what_is_printed_today() {
    // Ranks end in any order, and the version of busybox is Debian's matter.
    let comparable = |lines: Vec<String>| {
        let mut lines: Vec<String> =
            lines.into_iter().map(|line| line.split(" v1.").next().unwrap().to_owned()).collect();
        lines.sort();
        lines
    };
    let (picture, now) = (record::recorded().unwrap(), record::printed_now().unwrap());
    assert_eq!(
        comparable(picture),
        comparable(now),
        "docs/run.svg is made by `cargo run -p mizzen-tests -- record`"
    );
}

/// A file that a page has its readers write.
fn file_of(path: &str, name: &str) -> String {
    let blocks = Page::read(path).unwrap().blocks().unwrap();
    blocks.into_iter().find(|block| block.value("file") == Some(name)).unwrap().text
}

/// What root's prolog does gives users no file that they have put in the way of it.
#[test]
fn the_prologs_folders_follow_no_link() {
    let cluster = Cluster::start(Spec { nodes: 1, ..Cluster::spec("documents-prolog") }).unwrap();
    let lines = file_of("docs/admins.md", "mizzen-folder");
    let prolog = format!("#!/bin/sh -eu\numask 022\n{lines}");
    cluster.share("prolog", prolog.as_bytes()).unwrap();
    let root = |script: &str| cluster.run_on("node1", User::Root, script);
    let run = "SLURM_JOB_USER=alice SLURM_JOB_UID=2001 sh -eu /shared/prolog";
    let shown = "stat -c '%U %a' /var/lib/mizzen/users /var/lib/mizzen/users/mizzen-2001";
    // Twice, as for any job after the first.
    assert_out(&root(&format!("{run} && {run} && {shown}")), 0, "root 755\nalice 700\n");
    let used = "echo 'stage_directory = \"/var/lib/mizzen/users\"' > /etc/mizzen/mizzen.d/folder.toml";
    assert_eq!(root(&format!("mkdir -p /etc/mizzen/mizzen.d && {used}")).code, 0);
    let listed = cluster.run_on(
        "node1",
        User::Alice,
        "touch /var/lib/mizzen/users/mizzen-2001/x && mizzen cache list",
    );
    assert_eq!(listed.code, 0, "{}", listed.text());
    // Even where users can make names: a link of theirs, and a folder of somebody else's.
    let open =
        "rm -rf /var/lib/mizzen/users && mkdir -m 1733 /var/lib/mizzen/users && mkdir -m 700 /precious";
    assert_eq!(root(open).code, 0);
    for (plant, expected) in [
        ("ln -s /precious /var/lib/mizzen/users/mizzen-2001", "bob symbolic link\n"),
        ("mkdir /var/lib/mizzen/users/mizzen-2001", "bob directory\n"),
    ] {
        assert_out(&cluster.run_on("node1", User::Bob, plant), 0, "");
        let found = root(&format!("{run} && stat -c '%U %F' /var/lib/mizzen/users/mizzen-2001"));
        assert_out(&found, 0, expected);
        assert_out(
            &root("stat -c '%U %a' /precious; rm -r /var/lib/mizzen/users/mizzen-2001"),
            0,
            "root 700\n",
        );
    }
}

/// A node is drained for what `mizzen doctor` has found, not where it could not run.
#[test]
fn the_health_check_drains_for_a_verdict_only() {
    let cluster = Cluster::start(Spec { nodes: 1, ..Cluster::spec("documents-health") }).unwrap();
    cluster.share("health", file_of("docs/admins.md", "mizzen-health").as_bytes()).unwrap();
    // One doctor after another, in place of the installed one.
    let check = |doctor: &str| {
        let doctor = doctor.replace('\'', r"'\''");
        let script = format!(
            "printf '#!/bin/sh\\n%s\\n' '{doctor}' > /tmp/doctor; chmod 755 /tmp/doctor; \
             sed s,/usr/bin/mizzen,/tmp/doctor, /shared/health > /tmp/health; \
             SLURMD_NODENAME=node1 sh /tmp/health 2>/dev/null; code=$?; sinfo -hN -o '%T %E'; exit $code"
        );
        cluster.run_on("node1", User::Root, &script)
    };
    assert_out(&check("exit 0"), 0, "idle none\n");
    assert_out(&check("kill -KILL $$"), 137, "idle none\n");
    assert_out(&check("exit 125"), 125, "idle none\n");
    assert_out(&check("exit 1"), 1, "idle none\n");
    let verdict = "echo 'FAILED  user namespaces:  off'; exit 1";
    assert_out(&check(verdict), 1, "drained mizzen doctor: FAILED user namespaces: off\n");
}

#[test]
fn every_block_says_what_it_is() {
    for page in Page::all().unwrap() {
        let path = page.path.display();
        for block in page.blocks().unwrap() {
            let place = format!("{path}:{}: {:?}", block.line, block.words);
            let known = ["sh", "output", "text", "toml", "python", "bash", "dockerfile", "ini"];
            assert!(known.contains(&block.language()), "{place}");
            if block.has("not-run") {
                assert!(REASONS.iter().any(|reason| block.has(reason)), "{place}: not run, and why?");
            }
            if let Some(file) = block.value("from") {
                let original = fs::read_to_string(repository().join(file)).unwrap();
                assert_eq!(block.text, original, "{place}: the file is another one now");
            }
            if block.has("sources") {
                assert_makes(&block, &place);
            }
            if block.language() == "text" && !block.has("form") && block.value("from").is_none() {
                assert_eq!(block.command(), None, "{place}: a command, neither run nor marked");
            }
        }
        // An indented block cannot say what it is. In a list it is the item's text.
        let mut lines = page.text.lines().filter(|line| !line.is_empty());
        let mut fenced = false;
        let mut in_list = false;
        let stray = lines.find(|line| {
            fenced ^= line.trim_start().starts_with("```");
            if !line.starts_with(' ') {
                in_list = line.starts_with("- ") || line.starts_with(|c: char| c.is_ascii_digit());
            }
            line.starts_with("    ") && !fenced && !in_list
        });
        assert_eq!(stray, None, "{path}");
    }
}

/// What is called from the sources are targets of the Makefile.
fn assert_makes(block: &Block, place: &str) {
    let read = |file: &str| fs::read_to_string(repository().join(file)).unwrap();
    let makefile = read("Makefile") + &read("packaging/packages.mk");
    for line in block.text.lines().filter_map(|line| line.strip_prefix("make ")) {
        let target = line.split_whitespace().next().unwrap_or_default();
        assert!(makefile.contains(&format!("\n{target}:")), "{place}: make {target}");
    }
}

/// Pages whose commands are run, each on a cluster of its own.
macro_rules! run_pages {
    ($($name:ident $path:literal;)*) => {
        const RUN: &[&str] = &[$($path),*];
        $(#[test] fn $name() { run_page($path); })*
    };
}

run_pages! {
    admins "docs/admins.md";
    coming_from "docs/coming-from.md";
    example "examples/numpy/README.md";
    environment_files "docs/environment-files.md";
    faq "docs/faq.md";
    from_pyxis "docs/from-pyxis.md";
    gpu_and_fabric "docs/gpu-and-fabric.md";
    images "docs/images.md";
    quick_start "docs/quick-start.md";
    users "docs/users.md";
}

#[test]
fn no_page_is_left_out() {
    for page in Page::all().unwrap() {
        let blocks = page.blocks().unwrap();
        let run = blocks.iter().any(|block| is_run(block) || block.language() == "toml");
        let path = page.path.to_str().unwrap();
        assert_eq!(run, RUN.contains(&path), "{path}");
    }
}

fn is_run(block: &Block) -> bool {
    block.language() == "sh" && !block.has("not-run")
}

/// What the pages take for granted: `py.sqsh`, an image with Python, numpy and mpi4py; `rootfs.tar`, what it was made of;
/// and Docker Hub with busybox.
fn prepared(name: &str) -> (Cluster, LocalRegistry, ClusterRegistry) {
    let layout = Layout::new().unwrap();
    layout.image("busybox", &[&ImageTree::busybox().unwrap()], &["--config.cmd=sh"]).unwrap();
    let hub = LocalRegistry::start().unwrap();
    hub.push(&layout, "busybox", "library/busybox:latest", &[]).unwrap();
    // Only there the nodes have an MPI of their own.
    let rootfs = (name == "users").then(|| mpirun_rootfs(Release::Slurm22_05).unwrap());
    let spec =
        Spec { mizzen_toml: Some(TOML.to_owned()), rootfs, ..Cluster::spec(&format!("documents-{name}")) };
    let cluster = Cluster::start(spec).unwrap();
    let served = hub.serve_on(&cluster, 5000, None).unwrap();
    cluster.share("py.sqsh", &mpi().unwrap()).unwrap();
    if name == "numpy" {
        Example::NUMPY.install(&cluster).unwrap();
    }
    if name == "quick-start" {
        let tar = run_tool(
            std::process::Command::new("tar").args(["-C", mpi_rootfs().unwrap().to_str().unwrap()]).args([
                "-cf",
                &format!("/proc/{}/root/shared/rootfs.tar", cluster.pid_of("ctl")),
                "--exclude=./usr/share/doc",
                "--exclude=./usr/share/locale",
                "--exclude=./var",
                "--exclude=./dev",
                ".",
            ]),
        );
        tar.unwrap();
    }
    let scratch = "mkdir -p /shared/scratch/alice && chown -R alice: /shared/scratch/alice";
    assert_eq!(cluster.run_as_root(scratch).code, 0);
    for machine in ["ctl", "node1", "node2"] {
        // Named containers need a disk: the overlay that is a machine's root directory cannot be under another.
        let mounts = "mkdir /scratch && mount --bind /shared/scratch /scratch && \
                      mount -t tmpfs -o mode=1777 disk /var/tmp";
        let linked = cluster.run_on(machine, User::Root, mounts);
        assert_eq!(linked.code, 0, "{}", linked.text());
    }
    let home =
        cluster.run("for file in /shared/*.sqsh /shared/*.tar; do [ ! -e $file ] || ln -s $file .; done");
    assert_eq!(home.code, 0, "{}", home.text());
    (cluster, hub, served)
}

fn run_page(path: &str) {
    // An example is named by its directory.
    let named = if path.ends_with("README.md") { Path::new(path).parent().unwrap() } else { Path::new(path) };
    let name = named.file_stem().unwrap().to_str().unwrap().to_lowercase();
    let (cluster, _hub, _served) = prepared(&name);
    let mut printed = None;
    for block in Page::read(path).unwrap().blocks().unwrap() {
        let place = format!("{path}:{}", block.line);
        if let Some(file) = block.value("file") {
            cluster.share(".file", block.text.as_bytes()).unwrap();
            assert_eq!(cluster.run(&format!("cp /shared/.file {file}")).code, 0, "{place}");
        } else if is_run(&block) {
            let user = if block.has("root") { User::Root } else { User::Alice };
            let machine = if block.has("node") { "node1" } else { "ctl" };
            // The nodes of a job that is still cleaned up behind would not be taken, and the pages name them.
            cluster.run("while squeue -h -t CG | grep -q .; do sleep 0.1; done");
            let done =
                cluster.run_on(machine, user, &format!("set -e -o pipefail; exec 2>&1\n{}", block.text));
            let expected = block.value("exit").map_or(0, |code| code.parse().unwrap());
            assert_eq!(done.code, expected, "{place}:\n{}{}", block.text, done.text());
            printed = Some(mizzen_tests::without_waiting(&done.stdout));
        } else if block.language() == "output" {
            let printed = printed.take().expect("output of a block that was run");
            assert!(matches(&block.text, &printed), "{place}:\n{}is not\n{printed}", block.text);
        } else if block.language() == "toml" {
            check_toml(&cluster, &block, &place);
        }
    }
    assert!(cluster.all_idle(), "{path}: {:?}", cluster.node_states());
}

/// A part of mizzen.toml, or a rule for host.d.
fn check_toml(cluster: &Cluster, block: &Block, place: &str) {
    let file = if block.has("rule") { "/etc/mizzen/host.d/page.toml" } else { "/etc/page.toml" };
    cluster.share(".toml", block.text.as_bytes()).unwrap();
    let named = if block.has("rule") { "" } else { file };
    let checked = cluster.run_as_root(&format!(
        "cp /shared/.toml {file} && mizzen check-config {named}; code=$?; rm {file}; exit $code"
    ));
    assert_eq!(checked.code, 0, "{place}: {}", checked.text());
}
