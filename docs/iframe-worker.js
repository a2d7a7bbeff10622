// Pages opened by double click may start no worker, so the search runs in a hidden frame there.
// The plugin `offline` of the theme loads a package for this from elsewhere unless a file of the
// site has this name; the theme looks for `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise((loaded) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) =>
            this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = url
          script.onload = () => loaded(inside)
          inside.document.body.append(script)
        }
      })
      document.documentElement.append(frame)
    }

    async postMessage(data) {
      const inside = await this.ready
      inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
