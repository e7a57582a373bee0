#!/usr/bin/env bash
# Puts uPlot, the chart library of the web console, from npm into the package, with its licence. npm checks what it fetches against
# the registry's checksum. To take a newer one: change the version here, run this, and look at the console.
set -euo pipefail
VERSION=1.6.32
cd "$(dirname "${BASH_SOURCE[0]}")/../miles_async/console/web/static/vendor"
fetched=$(mktemp -d)
trap 'rm -rf "$fetched"' EXIT
npm pack --silent --pack-destination "$fetched" "uplot@$VERSION" > /dev/null
tar -xzf "$fetched/uplot-$VERSION.tgz" -C "$fetched"
cp "$fetched"/package/dist/{uPlot.iife.min.js,uPlot.min.css} .
cp "$fetched/package/LICENSE" uPlot.LICENSE
