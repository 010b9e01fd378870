# Packages: what `make portable` builds, laid out by `make install`. A part of the Makefile.

# A package's own number: its version is that of Cargo.toml, with this behind it.
REVISION ?= 1
# For which machines. For others than this one, PORTABLE must have been built, and MAN_PAGES_BY be a launcher that runs here.
ARCH     ?= $(shell uname -m)
MACHINE  := $(patsubst aarch64,AArch64,$(patsubst x86_64,X86-64,$(ARCH)))
DEB_ARCH := $(patsubst aarch64,arm64,$(patsubst x86_64,amd64,$(ARCH)))
DIST     := target/dist
PACKING  := target/packages

# Who answers for a package: who builds it (DEBFULLNAME, DEBEMAIL), else the author of the last commit.
OF_COMMIT   = $(shell git log -1 --format='$(2)' 2>/dev/null || sed -n '/Format/!s/^$(1) //p' packaging/commit)
MAINTAINER := $(if $(DEBEMAIL),$(DEBFULLNAME) <$(DEBEMAIL)>,$(call OF_COMMIT,author,%an <%ae>))
DATE       := $(or $(call OF_COMMIT,date,%ct),$(shell date +%s))
.PHONY: maintainer
maintainer:
	@test -n '$(MAINTAINER)' || { \
	  echo 'who answers for the packages? There is no commit here to tell: add DEBFULLNAME="NAME" DEBEMAIL=ADDRESS' >&2; exit 1; }
# What is built twice of one commit is the same twice. For who makes packages alone: compilers would build everything again that was
# built with another date.
AT_DATE := SOURCE_DATE_EPOCH=$(DATE)

FOR_PACKAGES := dpkg-dev debhelper rpm lintian rpmlint
deb rpm dist packages-test: PACKAGES += $(FOR_PACKAGES)

# The launcher that writes man pages and completions.
MAN_PAGES_BY = $(PORTABLE)/mizzen
BUILD = $(if $(filter $(shell uname -m),$(ARCH)),portable)
define IS_FOR_ARCH
@for file in $(PORTABLE)/*; do \
  readelf --file-header $$file | grep -q 'Machine:.*$(MACHINE)' || { echo "$$file is not for $(ARCH)" >&2; exit 1; }; \
done
endef

DEB  := mizzen_$(VERSION)-$(REVISION)_$(DEB_ARCH).deb
TREE  = $(PACKING)/mizzen-$(VERSION)
deb: maintainer deps $(BUILD)
	$(IS_FOR_ARCH)
	rm -rf $(TREE)
	install -d $(TREE) $(DIST)
	cp -R packaging/deb $(TREE)/debian
	mv $(TREE)/debian/lintian-overrides $(TREE)/debian/mizzen.lintian-overrides
	sed -i 's/@MAINTAINER@/$(MAINTAINER)/' $(TREE)/debian/control
	printf 'mizzen ($(VERSION)-$(REVISION)) unstable; urgency=medium\n\n  * %s\n\n -- $(MAINTAINER)  %s\n' \
	  'See changelog.gz.' "$$(date -u -R -d @$(DATE))" > $(TREE)/debian/changelog
	cd $(TREE) && $(AT_DATE) REPOSITORY=$(CURDIR) FROM=$(abspath $(PORTABLE)) MIZZEN=$(abspath $(MAN_PAGES_BY)) CONF=$(abspath $(CONF)) \
	  dpkg-buildpackage --build=binary --no-sign --no-check-builddeps --host-arch=$(DEB_ARCH)
	mv $(PACKING)/$(DEB) $(DIST)

RPM := mizzen-$(VERSION)-$(REVISION).$(ARCH).rpm
rpm: maintainer deps $(BUILD)
	$(IS_FOR_ARCH)
	install -d $(DIST)
	$(AT_DATE) rpmbuild -bb --target $(ARCH) --define '_topdir $(CURDIR)/$(PACKING)/rpm' --define 'mizzen_version $(VERSION)' \
	  --define 'mizzen_release $(REVISION)' --define 'repository $(CURDIR)' --define 'from $(abspath $(PORTABLE))' \
	  --define 'mizzen_packager $(MAINTAINER)' --define "mizzen_date $$(LC_ALL=C date -u -d @$(DATE) '+%a %b %d %Y')" \
	  --define 'man_pages_by $(abspath $(MAN_PAGES_BY))' --define 'conf $(abspath $(CONF))' packaging/rpm/mizzen.spec
	mv $(PACKING)/rpm/RPMS/$(ARCH)/$(RPM) $(DIST)

# What a release consists of. Of what is committed alone. ALSO=arm64: with the packages for 64-bit ARM.
dist: deps
	@test -z "$$(git status --porcelain)" || { echo 'there are changes that are not committed: git status' >&2; exit 1; }
	rm -rf $(DIST)
	install -d $(DIST)
	git archive --prefix=mizzen-$(VERSION)/ --output=$(DIST)/mizzen-$(VERSION).tar.gz HEAD
	$(MAKE) --no-print-directory deb rpm $(patsubst %,%-packages,$(ALSO))
	cd $(DIST) && sha256sum -- * > SHA256SUMS

# The packages, and newer ones with another build and another mizzen.toml in them, on throw-away clusters.
NEXT := $(PACKING)/next
packages-test: deps root deb rpm
	lintian --fail-on error $(DIST)/$(DEB)
	rpmlint --rpmlintrc packaging/rpm/rpmlintrc $(DIST)/$(RPM)
	$(CARGO) build -q -p mizzen-tests
	rm -rf $(NEXT)
	install -d $(NEXT)
	cp -R conf $(NEXT)/conf
	echo '# The next version says more.' >> $(NEXT)/conf/mizzen.toml
	$(MAKE) --no-print-directory deb rpm MIZZEN_BUILD='$(VERSION) (next)' REVISION=$(REVISION).1 PROFILE=quick BUILT=target/next \
	  PORTABLE=$(NEXT)/portable CONF=$(NEXT)/conf DIST=$(NEXT)
	$(CARGO) test -p mizzen-tests --test packages
