# `make demo` and `make test` do everything on a fresh Debian or Ubuntu machine with a Rust toolchain.
.PHONY: help build portable install uninstall deb rpm dist arm64-packages packages-test fleet-test test-kernels test-arm64 stage stage-inject deps root \
  demo demo-tensorflow demo-pytorch cluster test test-long releases bench bench-training fuzz fuzzers lint msrv bindings docs \
  docs-test clean

PREFIX     ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR    ?=
SHARE       = $(DESTDIR)$(PREFIX)/share

# The oldest glibc that the portable plugin runs with (RHEL 8 has 2.28, Debian 11 has 2.31).
GLIBC := 2.28
HOST  := $(shell rustc -vV | sed -n 's/^host: //p')
TOOLS := target/tools
# Where `install` takes the programs from, which of them writes the man pages, and where it takes the settings from.
FROM   ?= target/release
MIZZEN ?= $(FROM)/mizzen
CONF   ?= conf
# yes: `install` makes the link `enroot` too, for scripts that have the words of that command.
ENROOT ?= no
# release, or quick: built in seconds after an edit, and a little slower.
PROFILE ?= release
# How many pairs of trainings bench-training compares.
PAIRS ?= 10
# How long each parser is fuzzed.
SECONDS ?= 60
# What `mizzen --version` says: the commit as well, where there is a repository.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
COMMIT  := $(shell git rev-parse --short=10 HEAD 2>/dev/null || sed -n 's/^commit \([0-9a-f]\{10\}\).*/\1/p' packaging/commit)
export MIZZEN_BUILD := $(VERSION)$(if $(COMMIT), ($(COMMIT)))
# make's own flags name descriptors that cargo does not get, and cargo would warn of that.
CARGO := env -u MAKEFLAGS cargo

help:
	@echo 'make demo       a session on a throw-away two-node Slurm cluster (root)'
	@echo 'make demo-tensorflow, demo-pytorch   ResNet-50 on that cluster; ten minutes the first time (root)'
	@echo 'make test       every test, with real Slurm 20.11, 22.05, 24.11 and 26.05 (root)'
	@echo 'make test-long  the same with the full number of kills and cancels'
	@echo 'make test-kernels  containers on Linux 5.10, 6.1, 6.12 and the newest of Debian, and on Ubuntu'"'"'s, in virtual machines (root)'
	@echo 'make test-arm64    the same for 64-bit ARM, built here and emulated (root)'
	@echo 'make bench      mizzen beside its peers, in one run, as ratios, for docs/performance.md (root)'
	@echo 'make bench-training  trainings on the node and in a container, for docs/performance.md; PAIRS=10 (root)'
	@echo 'make fuzz       every parser of what others write; SECONDS=60 each, TARGET=squashfs'
	@echo 'make cluster    a shell on a throw-away cluster; RELEASE=22.05 NODES=2 (root)'
	@echo 'make build      target/release/mizzen, mizzen-import and libspank_mizzen.so'
	@echo 'make portable   the same for every distribution with glibc $(GLIBC) or newer: target/portable/'
	@echo 'make install    PREFIX=$(PREFIX) SYSCONFDIR=$(SYSCONFDIR) DESTDIR=$(DESTDIR) FROM=$(FROM) ENROOT=$(ENROOT)'
	@echo 'make uninstall  the same PREFIX, SYSCONFDIR and DESTDIR; settings that were changed stay'
	@echo 'make deb, make rpm   packages of the portable build, in $(DIST)/'
	@echo 'make arm64-packages  the same for 64-bit ARM'
	@echo 'make dist       packages, the sources and SHA256SUMS; RELEASE.md says what belongs before it'
	@echo 'make packages-test   both installed, used, upgraded and removed on throw-away clusters (root)'
	@echo 'make docs       the documents as a book: target/book/index.html'
	@echo 'make docs-test  the book in a browser: nothing overflows, nothing is missing'
	@echo 'make fleet-test the Ansible role in packaging/ansible, on clusters that know nothing of mizzen (root)'
	@echo 'make lint       formatting and clippy'
	@echo 'make msrv       does Rust $(MSRV) build it?'

# The launcher has no libraries: it also runs inside images, under the names of Slurm's commands.
STATIC = RUSTFLAGS='-C target-feature=+crt-static' $(CARGO) build --profile $(PROFILE) --target $(HOST) -p mizzen \
  --target-dir target/static

# The importer has the node's C library, which knows how names of registries are resolved here.
build: override PROFILE := release
build:
	$(CARGO) build --release -p spank-mizzen
	$(CARGO) build --release -p mizzen-import
	$(STATIC)
	install -D -t target/release target/static/$(HOST)/release/mizzen

# New files come by rename: steps that run keep the old ones, and no step finds half of one.
define put
install -D -m $(3) $(1) $(DESTDIR)$(PREFIX)/$(2).new && mv -T $(DESTDIR)$(PREFIX)/$(2).new $(DESTDIR)$(PREFIX)/$(2)
endef
FOR_PREFIX := sed 's|@PREFIX@|$(PREFIX)|g; s|@SYSCONFDIR@|$(SYSCONFDIR)|g'
SETTINGS    = $(patsubst $(CONF)/%,%,$(wildcard $(CONF)/mizzen.toml $(CONF)/host.d/*.toml))
PLUGSTACK   = $(DESTDIR)$(SYSCONFDIR)/slurm/plugstack.conf.d/mizzen.conf

# What an administrator has changed stays. The line that loads the plugin comes last.
install:
	$(call put,$(FROM)/libspank_mizzen.so,lib/mizzen/spank_mizzen.so,644)
	$(call put,$(FROM)/mizzen,bin/mizzen,755)
	ln -sf ../../bin/mizzen $(DESTDIR)$(PREFIX)/lib/mizzen/mizzen-enter
	test '$(ENROOT)' != yes || ln -sf mizzen $(DESTDIR)$(PREFIX)/bin/enroot
	$(call put,$(FROM)/mizzen-import,lib/mizzen/mizzen-import,755)
	install -d $(addprefix $(SHARE)/man/,man1 man5 man7) $(SHARE)/bash-completion/completions $(SHARE)/zsh/site-functions \
	  $(SHARE)/fish/vendor_completions.d $(SHARE)/mizzen/apparmor $(SHARE)/doc/mizzen
	$(MIZZEN) man $(SHARE)/man/man1
	mv $(SHARE)/man/man1/*.5 $(SHARE)/man/man5
	mv $(SHARE)/man/man1/*.7 $(SHARE)/man/man7
	$(MIZZEN) completions bash > $(SHARE)/bash-completion/completions/mizzen
	$(MIZZEN) completions zsh > $(SHARE)/zsh/site-functions/_mizzen
	$(MIZZEN) completions fish > $(SHARE)/fish/vendor_completions.d/mizzen.fish
	install -m 644 $(CONF)/mizzen.toml $(CONF)/job_submit.lua $(SHARE)/doc/mizzen
	sed 's|/usr/bin/|$(PREFIX)/bin/|' packaging/apparmor/mizzen > $(SHARE)/mizzen/apparmor/mizzen
	install -d $(DESTDIR)$(SYSCONFDIR)/mizzen/mizzen.d
	for file in $(SETTINGS); do \
	  test -e $(DESTDIR)$(SYSCONFDIR)/mizzen/$$file || \
	    install -D -m 644 $(CONF)/$$file $(DESTDIR)$(SYSCONFDIR)/mizzen/$$file || exit 1; \
	done
	$(FOR_PREFIX) packaging/plugstack.sh > $(DESTDIR)$(PREFIX)/lib/mizzen/plugstack
	chmod 755 $(DESTDIR)$(PREFIX)/lib/mizzen/plugstack
	$(FOR_PREFIX) $(CONF)/plugstack.conf.d/mizzen.conf > $(SHARE)/mizzen/plugstack.conf
	test -e $(PLUGSTACK) || install -D -m 644 $(SHARE)/mizzen/plugstack.conf $(PLUGSTACK)

# In the opposite order. The link for AppArmor is one that an administrator has made, as docs/admins.md tells.
APPARMOR    = $(DESTDIR)$(SYSCONFDIR)/apparmor.d/mizzen
uninstall:
	DESTDIR='$(DESTDIR)' sh $(DESTDIR)$(PREFIX)/lib/mizzen/plugstack disable
	! cmp -s $(PLUGSTACK).removed $(SHARE)/mizzen/plugstack.conf || rm $(PLUGSTACK).removed
	for file in $(SETTINGS); do \
	  ! cmp -s $(CONF)/$$file $(DESTDIR)$(SYSCONFDIR)/mizzen/$$file || rm $(DESTDIR)$(SYSCONFDIR)/mizzen/$$file || exit 1; \
	done
	test "$$(readlink $(DESTDIR)$(PREFIX)/bin/enroot)" != mizzen || rm $(DESTDIR)$(PREFIX)/bin/enroot
	test "$$(readlink $(APPARMOR))" != $(PREFIX)/share/mizzen/apparmor/mizzen || rm $(APPARMOR)
	rm -f $(DESTDIR)$(PREFIX)/bin/mizzen $(SHARE)/man/man[157]/mizzen[-.]* $(SHARE)/bash-completion/completions/mizzen \
	  $(SHARE)/zsh/site-functions/_mizzen $(SHARE)/fish/vendor_completions.d/mizzen.fish
	rm -rf $(DESTDIR)$(PREFIX)/lib/mizzen $(SHARE)/mizzen $(SHARE)/doc/mizzen
	rmdir --ignore-fail-on-non-empty $(wildcard $(addprefix $(DESTDIR)$(SYSCONFDIR)/mizzen,/host.d /mizzen.d /))

# The plugin must run in the distribution's Slurm, so it is linked against an old glibc. The launcher has musl, where the
# toolchain has that: it starts a third of a millisecond faster in virtual machines, where glibc's questions to the CPU are
# dear, and every task starts it. The importer goes with it.
MUSL := $(subst -gnu,-musl,$(HOST))
# Where cargo builds, and where what it has built goes.
BUILT    := target
PORTABLE := target/portable
ZIGBUILD := PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(CARGO) zigbuild
portable: $(TOOLS)/ready
	$(ZIGBUILD) --profile $(PROFILE) --target $(HOST).$(GLIBC) -p spank-mizzen --target-dir $(BUILT)
	install -D -t $(PORTABLE) $(BUILT)/$(HOST)/$(PROFILE)/libspank_mizzen.so
	if [ -d "$$(env -u MAKEFLAGS rustc --print target-libdir --target $(MUSL))" ]; then \
	  RUSTFLAGS='-C link-arg=-pie' $(ZIGBUILD) --profile $(PROFILE) --target $(MUSL) -p mizzen -p mizzen-import \
	    --target-dir $(BUILT) && \
	  install -t $(PORTABLE) $(addprefix $(BUILT)/$(MUSL)/$(PROFILE)/,mizzen mizzen-import); \
	else \
	  $(STATIC) && install -t $(PORTABLE) target/static/$(HOST)/$(PROFILE)/mizzen && \
	  $(ZIGBUILD) --profile $(PROFILE) --target $(HOST).$(GLIBC) -p mizzen-import --target-dir $(BUILT) && \
	  install -t $(PORTABLE) $(BUILT)/$(HOST)/$(PROFILE)/mizzen-import; \
	fi

$(TOOLS)/ready: packaging/portable.txt
	python3 -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet --requirement packaging/portable.txt
	rustup target add $(MUSL) || echo 'no $(MUSL) for this toolchain: the launcher will have glibc'
	touch $@

# What the virtual cluster has installed: the portable build, as a package would install it.
stage: portable
	rm -rf target/stage
	$(MAKE) --no-print-directory install FROM=target/portable DESTDIR=target/stage PREFIX=/usr

# For tests alone: the plugin that panics on demand.
stage-inject: $(TOOLS)/ready
	$(ZIGBUILD) --profile quick --target $(HOST).$(GLIBC) -p spank-mizzen --features inject-panic --target-dir target/inject
	install -D target/inject/$(HOST)/quick/libspank_mizzen.so target/stage-inject/usr/lib/mizzen/spank_mizzen.so

# Debian packages for the build and for the virtual cluster.
PACKAGES := gcc g++ libc6-dev python3 python3-venv mmdebstrap debian-archive-keyring iproute2 libclang-dev \
  squashfs-tools busybox-static binutils umoci skopeo docker-registry openssl strace groff-base

deps:
	@missing=$$(for package in $(PACKAGES); do \
	    dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q '^install ok installed' || echo $$package; \
	  done); \
	[ -z "$$missing" ] && exit 0; \
	if [ "$$(id -u)" != 0 ]; then \
	  echo "these packages are missing; as root: apt-get install" $$missing >&2; exit 1; \
	fi; \
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $$missing

root:
	@[ "$$(id -u)" = 0 ] || { echo 'a cluster needs root (namespaces, mounts, network); try: sudo -E make $(MAKECMDGOALS)' >&2; exit 1; }
	@apt-get indextargets 'Created-By: Packages' | grep -q . || apt-get update -q

cluster: PROFILE := quick
cluster: deps root stage
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster shell $(RELEASE) $(NODES)

# Nothing is measured here, so it does not wait for the optimizer.
demo: PROFILE := quick
demo: deps root stage
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster demo

# The examples with the real frameworks: their images are made first, of a gigabyte of packages.
demo-tensorflow demo-pytorch: deps root stage
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster demo $(@:demo-%=%)

# The tests wait for Slurm more than they compute, and nothing is measured. What is tested for a release is what it has.
test: export RUST_TEST_THREADS ?= $(shell expr 2 \* $$(nproc))
test: PROFILE = $(if $(MIZZEN_TEST_LONG),release,quick)
test: deps root
	$(CARGO) fetch -q --locked --target $(HOST)
	$(CARGO) build -q -p mizzen-tests
	$(MAKE) --no-print-directory -j2 stage releases stage-inject fuzzers PROFILE=$(PROFILE)
	$(CARGO) test --workspace
	$(MAKE) --no-print-directory fuzz SECONDS=3

# Beside `stage`: this waits for the network and the disk, that for the linker, which uses one processor.
releases:
	target/debug/vcluster releases

bench: deps root stage
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster bench

# Not a part of `bench`: it takes about an hour, and renews docs/performance.md.
bench-training: deps root stage
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster bench training $(PAIRS)

test-long: export MIZZEN_TEST_LONG = 1
test-long: test

# Virtual machines. They are emulated where the processor does not help, and take minutes each.
test-kernels test-arm64: PACKAGES += e2fsprogs gzip xz-utils zstd
test-kernels: deps root stage
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster kernels $(KERNEL)

# The packages for 64-bit ARM. The man pages are written by the launcher for this machine.
ARM64 := aarch64-unknown-linux-gnu
arm64-packages: PACKAGES += $(FOR_PACKAGES)
arm64-packages: deps portable
	rustup target add $(ARM64) $(ARM64:gnu=musl)
	$(MAKE) --no-print-directory portable HOST=$(ARM64) PORTABLE=target/portable-arm64
	$(MAKE) --no-print-directory deb rpm ARCH=aarch64 PORTABLE=target/portable-arm64 MAN_PAGES_BY=target/portable/mizzen

# What is tested is what the package has. The test programs are not optimized so far.
ARM64_DIST  := target/packages/arm64
ARM64_TESTS := target/arm64-tests.json
test-arm64: PACKAGES += $(FOR_PACKAGES)
test-arm64: deps root stage
	rm -rf $(ARM64_DIST) target/stage-arm64
	$(MAKE) --no-print-directory arm64-packages DIST=$(ARM64_DIST)
	dpkg-deb -x $(ARM64_DIST)/*_arm64.deb target/stage-arm64
	RUSTFLAGS='-C link-arg=-pie' PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" env -u MAKEFLAGS cargo-zigbuild test --no-run --profile quick \
	  --target $(ARM64:gnu=musl) -p mizzen -p mizzen-core -p mizzen-import -p mizzen-squashfs --lib --test filter \
	  --message-format=json-render-diagnostics > $(ARM64_TESTS)
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster arm64 target/stage-arm64 $$(sed -nE \
	  's|.*"executable":"([^"]*/deps/(mizzen(_core\|_import\|_squashfs)?\|filter)-[^"]*)".*|\1|p' $(ARM64_TESTS))

# libFuzzer needs the compiler's help to see where an input leads. cargo-fuzz asks nightly Rust for it; the same pass of LLVM
# is there in stable Rust.
COVERAGE := -Cpasses=sancov-module $(patsubst %,-Cllvm-args=-sanitizer-coverage-%,\
  level=4 inline-8bit-counters pc-table trace-compares)
fuzzers: deps
	RUSTFLAGS='$(COVERAGE)' $(CARGO) build -q --profile fuzz --target $(HOST) --target-dir target/fuzz -p mizzen-fuzz \
	  --no-default-features --features libfuzzer --bin parsers

fuzz: fuzzers
	$(CARGO) run -q -p mizzen-fuzz -- target/fuzz/$(HOST)/fuzz/parsers $(SECONDS) $(TARGET)

# The book. Its tool takes minutes to build, and no network afterwards.
MDBOOK := 0.5.4
docs: $(TOOLS)/bin/mdbook
	$< build docs

# Not a part of `test`: on a new machine it builds mdBook and fetches a browser, which takes minutes.
docs-test: PACKAGES := chromium-headless-shell fonts-dejavu-core
docs-test: deps docs
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster browse

# Not a part of `test`: it makes root file systems with sshd and Python, and fetches Ansible, which takes minutes.
fleet-test: PACKAGES += openssh-client dpkg-dev debhelper
fleet-test: deps root stage deb target/ansible/ready
	$(CARGO) build -q -p mizzen-tests
	target/debug/vcluster fleet

target/ansible/ready: packaging/ansible/requirements.txt
	python3 -m venv target/ansible
	target/ansible/bin/pip install --quiet --requirement $<
	touch $@

$(TOOLS)/bin/mdbook:
	$(CARGO) install -q --locked --root $(TOOLS) --version $(MDBOOK) --no-default-features --features search mdbook

include packaging/packages.mk

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings

# The oldest Rust that mizzen is built with. On any newer one, clippy in `make lint` finds uses of what that one lacks.
MSRV := $(shell sed -n 's/^rust-version = "\(.*\)"/\1.0/p' Cargo.toml)
msrv:
	@rustup run $(MSRV) rustc --version 2>/dev/null || rustup toolchain install --profile minimal --no-self-update $(MSRV) || \
	  { echo 'Rust $(MSRV) is needed, and rustup could not install it; from where it can: rustup toolchain install $(MSRV)' >&2; exit 1; }
	env -u MAKEFLAGS rustup run $(MSRV) cargo check -q --workspace --all-targets --locked --target-dir target/msrv

# Renews the shipped SPANK bindings from the oldest supported release.
bindings:
	SLURM_INCLUDE_DIR=$(CURDIR)/target/rootfs/slurm-bullseye/usr/include \
	  $(CARGO) build -q -p spank-mizzen --features bindgen --target-dir target/bindings
	cp "$$(ls -t target/bindings/debug/build/spank-mizzen-*/out/bindings.rs | head -n 1)" \
	  spank-plugin/src/spank/bindings.rs

clean:
	rm -rf target
