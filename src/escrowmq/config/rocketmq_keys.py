"""Every key that a configuration file of Apache RocketMQ 4.9.7 or 5.5.0 may set.

RocketMQ sets `xxx=...` by calling `setXxx` on its configuration objects, so the names are those of
the setters (and of a few fields that have none) in BrokerConfig, MessageStoreConfig (also that of
the tiered store), NettyServerConfig, NettyClientConfig, NamesrvConfig, ControllerConfig,
JraftConfig and AuthConfig in the jars of the two releases, and two that the broker's main class
reads itself (rmqAddressServer...). The keys that EscrowMQ has are in this list too.
"""

from __future__ import annotations

from typing import Final

_NAMES: Final = """
    accessMessageInMemoryHotRatio accessMessageInMemoryMaxRatio accountStatsEnable
    accountStatsPrintZeroValues ackMessageThreadPoolNums ackThreadPoolQueueCapacity
    aclCacheExpiredSecond aclCacheMaxNum aclCacheRefreshSecond aclEnable
    adminBrokerThreadPoolNums adminBrokerThreadPoolQueueCapacity allAckInSyncStateSet
    allowRecallWhenBrokerNotWriteable appendAckAsync appendCkAsync appendTopicForTimerDeleteKey
    asyncLearner asyncSendEnable authConfigPath authenticationEnabled
    authenticationMetadataProvider authenticationProvider authenticationStrategy
    authenticationWhitelist authorizationEnabled authorizationMetadataProvider
    authorizationProvider authorizationStrategy authorizationWhitelist
    autoCreateSubscriptionGroup autoCreateTopicEnable autoDeleteUnusedStats
    autoMessageVersionOnTopicLen batchDispatchRequestThreadPoolNums bindAddress
    bitMapLengthConsumeQueueExt bottomMostCompressionTypeForConsumeQueueStore
    broadcastOffsetExpireMaxSecond broadcastOffsetExpireSecond brokerClusterName
    brokerConfigPath brokerElectionPriority brokerFastFailureEnable brokerHeartbeatInterval
    brokerIP1 brokerIP2 brokerId brokerName brokerNotActiveTimeoutMillis brokerPermission
    brokerRole brokerTopicEnable cgColdReadThreshold channelExpiredTimeout
    channelNotActiveInterval checkCRCOnRecover checkCommitLogOffsetOnRecover
    checkSyncStateSetPeriod cleanFileForciblyEnable cleanOfflineBrokerInterval
    cleanResourceInterval cleanRocksDBDirtyCQIntervalMin cleanSwapedMapInterval
    clearRetryTopicWhenDeleteTopic clientAsyncSemaphoreValue clientCallbackExecutorThreads
    clientChannelMaxIdleTimeSeconds clientCloseSocketIfTimeout clientManageThreadPoolNums
    clientManagerThreadPoolQueueCapacity clientOnewaySemaphoreValue
    clientPooledByteBufAllocatorEnable clientRequestThreadPoolNums
    clientRequestThreadPoolQueueCapacity clientSocketRcvBufSize clientSocketSndBufSize
    clientWorkerThreads clusterName clusterTest clusterTopicEnable coldCtrStrategyEnable
    coldDataFlowControlEnable coldDataScanEnable combineAssignOffsetCQType
    combineCQEnableCheckSelf combineCQLoadingCQTypes combineCQMaxExtraSearchCommitLogFiles
    combineCQPreferCQType combineCQUseRocksdbForLmq commercialBaseCount commercialBigCount
    commercialEnable commercialSizePerMsg commercialTimerCount commercialTransCount
    commitCommitLogLeastPages commitCommitLogThoroughInterval commitIntervalCommitLog
    commitLogForceSwapMapInterval commitLogRecoverMaxNum commitLogRollingInterval
    commitLogRollingMinimumSize commitLogSwapMapInterval commitLogSwapMapReserveFileNum
    compactionCqMappedFileSize compactionMappedFileSize compactionScheduleInternal
    compactionThreadNum compatibleWithOldNameSrv compressedRegister configBlackList
    configManagerVersion configName configStorePath connectTimeoutMillis
    consumerFallbehindThreshold consumerManageThreadPoolNums
    consumerManagerThreadPoolQueueCapacity consumerOffsetUpdateVersionStep controllerAddr
    controllerDLegerGroup controllerDLegerPeers controllerDLegerSelfId
    controllerHeartBeatTimeoutMills controllerRequestThreadPoolQueueCapacity controllerStorePath
    controllerThreadPoolNums controllerType correctLogicMinOffsetForceInterval
    correctLogicMinOffsetSleepInterval dLegerGroup dLegerPeers dLegerSelfId dataReadAheadEnable
    debugLockEnable defaultMessageRequestMode defaultPopShareQueueNum defaultQueryMaxNum
    defaultThreadPoolNums defaultThreadPoolQueueCapacity defaultTopicQueueNums
    delayOffsetUpdateVersionStep deleteCommitLogFilesInterval deleteConsumeQueueFilesInterval
    deleteFileBatchMax deleteTopicWithBrokerRegistration deleteWhen
    destroyMapedFileIntervalForcibly disableCallbackExecutor disableConsumeIfConsumerReadSlowly
    disableNettyWorkerGroup disappearTimeAfterStart diskFallRecorded diskMaxUsedSpaceRatio
    diskSpaceCleanForciblyRatio diskSpaceWarningLevelRatio dispatchCqCacheNum dispatchCqThreads
    dispatchFromSenderThread duplicationEnable electMasterMaxRetryCount
    enableAcceleratedRecovery enableAllTopicList enableAsyncReput enableAutoInSyncReplicas
    enableBatchPush enableBroadcastOffsetStore enableBuildConsumeQueueConcurrently
    enableCalcFilterBitMap enableCleanExpiredOffset enableCompaction enableConnectionMetrics
    enableConsumeQueueExt enableControllerInNamesrv enableControllerMode enableCreateSysGroup
    enableDLegerCommitLog enableDetailStat enableElectUncleanMaster
    enableFastChannelEventProcess enableLagAndDlqMetrics enableLiteEventMode enableLitePopLog
    enableLmq enableLmqQuota enableLmqStats enableLogConsumeQueueRepeatedlyBuildWhenRecover
    enableMessageStoreMetrics enableMixedMessageType enableMultiDispatch
    enableNetWorkFlowControl enableNotifyAfterPopOrderLockRelease
    enableNotifyBeforePopCalculateLag enablePopBatchAck enablePopBufferMerge enablePopLog
    enablePopMessageThreshold enablePopMetrics enablePropertyFilter enableReconnectForGoAway
    enableRegisterProducer enableRemoteEscape enableRemotingMetrics enableRequestMetrics
    enableRetryTopicV2 enableRocksDBLog enableRunningFlagsInFlush enableScheduleAsyncDeliver
    enableScheduleMessageStats enableShutdownGracefully enableSingleTopicRegister
    enableSkipLongAwaitingAck enableSlaveActingMaster enableSplitMetadata
    enableSplitRegistration enableStatsMetrics enableTopicList enableTransactionMetrics
    enabledAppendPropCRC endTransactionPoolQueueCapacity endTransactionThreadPoolNums
    estimateAccumulation expectConsumerNumUseFilter fastFailIfNoBufferInStorePool
    fetchControllerAddrByDnsLookup fetchNameSrvAddrByDnsLookup fetchNamesrvAddrByAddressServer
    fetchNamesrvAddrInterval fileReservedTime filterDataCleanTimeSpan filterServerNums
    filterSupportRetry flushCommitLogLeastPages flushCommitLogThoroughInterval
    flushCommitLogTimed flushConsumeQueueLeastPages flushConsumeQueueThoroughInterval
    flushConsumerOffsetHistoryInterval flushConsumerOffsetInterval flushDelayOffsetInterval
    flushDiskType flushIntervalCommitLog flushIntervalConsumeQueue
    flushLeastPagesWhenWarmMapedFile forceRegister forceVerifyPropCRC forwardTimeout
    globalColdReadThreshold haFlowControlEnable haHousekeepingInterval haListenPort
    haMasterAddress haMaxGapNotInSync haMaxTimeSlaveNotCatchup haSendHeartbeatInterval
    haSlaveFallbehindMax haTransferBatchSize heartbeatThreadPoolNums
    heartbeatThreadPoolQueueCapacity highSpeedMode inBrokerContainer inSyncReplicas
    indexFileReadEnable indexFileWriteEnable indexRocksDBEnable initAuthenticationUser
    initPopOffsetByCheckMsgInMem innerClientAuthenticationCredentials isolateLogEnable
    iteratorWhenUseRocksdbConsumeQueue jRaftControllerRPCAddr jRaftElectionTimeoutMs
    jRaftGroupId jRaftInitConf jRaftScanWaitTimeoutMs jRaftServerId jRaftSnapshotIntervalSecs
    jraftConfig kvConfigPath listenPort liteEventCheckInterval liteEventFullDispatchDelayTime
    liteEventFullDispatchDelayTimeForWildcardGroup liteLagCountMetricsEnable
    liteLagLatencyCollectEnable liteLagLatencyMetricsEnable liteLagLatencyTopK
    litePullMessageEnable litePullMessageThreadPoolNums litePullThreadPoolQueueCapacity
    liteSubscriptionCheckInterval liteSubscriptionCheckTimeoutMills liteTtlCheckInterval
    loadBalancePollNameServerInterval loadBalanceProcessorThreadPoolNums
    loadBalanceThreadPoolQueueCapacity lockInStrictMode logicQueueForceSwapMapInterval
    logicQueueSwapMapInterval logicQueueSwapMapReserveFileNum
    logicalDiskSpaceCleanForciblyThreshold longPollingEnable mappedFileSize
    mappedFileSizeCommitLog mappedFileSizeConsumeQueue mappedFileSizeConsumeQueueExt
    mappedFileSizeTimerLog mappedFileSwapEnable mapperFileSizeBatchConsumeQueue
    maxAsyncPutMessageRequests maxBatchDeleteFilesNum maxChecksumRange maxClientEventCount
    maxConsumeQueueScan maxDelayTime maxErrorRateOfBloomFilter maxFilterMessageSize
    maxHaTransferByteInSecond maxHashSlotNum maxIndexNum maxLiteSubscriptionCount
    maxLmqConsumeQueueNum maxMessageFilterNumForNotification maxMessageSize maxMsgsNumBatch
    maxOffsetMapSize maxPopPollingSize maxReconnectIntervalTimeSeconds maxRecoveryCommitlogFiles
    maxRocksDBIndexQueryDays maxSlaveResendLength maxStatsIdleTimeInMinutes maxTopicLength
    maxTransferBytesOnMessageInDisk maxTransferBytesOnMessageInMemory
    maxTransferCountOnMessageInDisk maxTransferCountOnMessageInMemory memTableFlushIntervalMs
    messageDelayLevel messageIndexEnable messageIndexSafe messageStorePlugIn
    metricGrpcExporterIntervalInMills metricGrpcExporterTimeOutInMills
    metricLoggingExporterIntervalInMills metricsExportBatchMaxDataPoints metricsExporterType
    metricsGrpcExporterHeader metricsGrpcExporterTarget metricsInDelta metricsLabel
    metricsOtelCardinalityLimit metricsPromExporterHost metricsPromExporterPort
    migrateAuthFromV1Enabled minInSyncReplicas minLiteTTl msgTraceTopicName namesrvAddr
    needWaitForService notifyBrokerRoleChanged notifyConsumerIdsChangedEnable
    notifyMinBrokerIdChanged objectStoreAccessKey objectStoreBucket objectStoreEndpoint
    objectStoreSecretKey offsetCheckInSlave orderMessageEnable osPageCacheBusyTimeOutMills
    persistConsumerOffsetIncrementally popCkMaxBufferSize popCkOffsetMaxQueueSize
    popCkStayBufferTime popCkStayBufferTimeOut popConsumerFSServiceInit
    popConsumerKVServiceEnable popConsumerKVServiceInit popConsumerKVServiceLog
    popFromRetryProbability popFromRetryProbabilityForPriority popInflightMessageThreshold
    popLongPollingForceNotifyInterval popPollingMapExpireTimeSeconds popPollingMapSize
    popPollingSize popResponseReturnActualRetryTopic popReviveConcurrency
    popReviveMaxAttemptTimes popReviveMaxReturnSizePerRead popReviveSkipIfGroupAbsent
    preferredLeaderId printChannelGroups printChannelGroupsMinNum priorityOrderAsc
    processReadEvent processReplyMessageThreadPoolNums productEnvName pullBatchMaxMessageCount
    pullMessageThreadPoolNums pullThreadPoolQueueCapacity putConsumeQueueDataByFileChannel
    putMessageFutureThreadPoolNums putMessageTimeout putMsgIndexHightWater
    putThreadPoolQueueCapacity queryMessageThreadPoolNums queryThreadPoolQueueCapacity
    readAheadCacheEnable readAheadCacheExpireDuration readAheadCacheSizeThresholdRate
    readAheadMessageCountThreshold readAheadMessageSizeThreshold readOnlyCommitLogStorePaths
    readUnCommitted realTimeNotifyConsumerChange realTimePersistRocksDBConfig
    recallMessageEnable recheckReputOffsetFromCq recordGetMessageResult recoverConcurrently
    recoverThreadPoolNums redeleteHangedFileInterval regionId registerBrokerTimeoutMills
    registerNameServerPeriod rejectPullConsumerEnable rejectTransactionMessage
    replicasPerDiskPartition replyThreadPoolQueueCapacity retrieveMessageFromPopRetryTopicV1
    returnOrderTopicConfigToBroker reviveAckWaitMs reviveInterval reviveMaxSlow reviveQueueNum
    reviveScanTime rmqAddressServerDomain rmqAddressServerSubGroup rocketmqHome
    rocksdbCQDoubleWriteEnable rocksdbCompressionType rocksdbFlushWalFrequency
    rocksdbWalFileRollingThreshold sampleCountThreshold sampleSteps scanAvailableNameSrv
    scanInactiveMasterInterval scanNotActiveBrokerInterval scheduleAsyncDeliverMaxPendingLimit
    scheduleAsyncDeliverMaxResendNum2Blocked searchBcqByCacheEnable sendHeartbeatTimeoutMillis
    sendMessageThreadPoolNums sendThreadPoolQueueCapacity serverAsyncSemaphoreValue
    serverCallbackExecutorThreads serverChannelMaxIdleTimeSeconds serverLoadBalancerEnable
    serverNettyWorkerGroupEnable serverOnewaySemaphoreValue serverPooledByteBufAllocatorEnable
    serverSelectorThreads serverSocketBacklog serverSocketRcvBufSize serverSocketSndBufSize
    serverWorkerThreads sharedByteBufferNum shortPollingTimeMills shutdownWaitTimeSeconds
    skipPreOnline skipWhenCKRePutReachMaxTimes slaveReadEnable slaveTimeout socksProxyConfig
    spinLockCollisionRetreatOptimalDegree splitMetadataSize splitRegistrationSize
    startAcceptSendRequestTimeStamp statRocksDBCQIntervalSec
    statefulAuthenticationCacheExpiredSecond statefulAuthenticationCacheMaxNum
    statefulAuthorizationCacheExpiredSecond statefulAuthorizationCacheMaxNum
    storePathBrokerIdentity storePathCommitLog storePathDLedgerCommitLog storePathEpochFile
    storePathRootDir storeReplyMessageEnable storeType subscriptionExpiredTimeout
    supportActingMaster syncBrokerMemberGroupPeriod syncBrokerMetadataPeriod
    syncControllerMetadataPeriod syncFlushTimeout syncFromLastFile
    syncMasterFlushOffsetWhenStartup tieredBackendServiceProvider tieredMetadataServiceProvider
    tieredStorageLevel tieredStoreCommitLogMaxSize tieredStoreConsumeQueueMaxSize
    tieredStoreCrcCheckEnable tieredStoreDeleteFileEnable tieredStoreDeleteFileInterval
    tieredStoreFilePath tieredStoreFileReservedTime tieredStoreGroupCommit
    tieredStoreGroupCommitCount tieredStoreGroupCommitSize tieredStoreGroupCommitTimeout
    tieredStoreIndexFileMaxHashSlotNum tieredStoreIndexFileMaxIndexNum
    tieredStoreMaxGroupCommitCount tieredStoreMaxPendingLimit timerCheckMetricsWhen
    timerColdDataCheckIntervalMs timerCongestNumEachSlot timerEnableCheckMetrics
    timerEnableDisruptor timerEnableRetryUntilSuccess timerFlushIntervalMs
    timerGetMessageThreadNum timerInterceptDelayLevel timerMaxDelaySec timerMetricSmallThreshold
    timerPrecisionMs timerProgressLogIntervalMs timerPutMessageThreadNum
    timerRecallToTimeWheelEnable timerRecallToTimelineEnable timerReputServiceCorePoolSize
    timerReputServiceMaxPoolSize timerReputServiceQueueCapacity timerRocksDBEnable
    timerRocksDBPrecisionMs timerRocksDBRollIntervalHours timerRocksDBRollMaxTps
    timerRocksDBRollRangeHours timerRocksDBStopScan timerRocksDBTimeExpiredMaxTps
    timerRollWindowSlot timerSkipUnknownError timerStopDequeue timerStopEnqueue timerWarmEnable
    timerWheelEnable timerWheelSnapshotFlush timerWheelSnapshotIntervalMs topicQueueLockNum
    totalReplicas traceOn traceTopicEnable transRocksDBEnable transWriteOriginTransHalfEnable
    transactionCheckInterval transactionCheckMax transactionCheckRocksdbCoreThreads
    transactionCheckRocksdbMaxThreads transactionCheckRocksdbQueueCapacity
    transactionMetricFlushInterval transactionOpBatchInterval transactionOpMsgMaxSize
    transactionTimeOut transferMsgByHeap transientStorePoolEnable transientStorePoolSize
    travelCqFileNumWhenGetMessage unRegisterBrokerQueueCapacity updateNameServerAddrPeriod
    useABSLock useEpollNativeSelector useMessageFilterForNotification usePIDColdCtrStrategy
    useReentrantLockWhenPutMessage useSeparateRetryQueue useSeparateStorePathForRocksdbCQ
    useServerSideResetOffset useSingleRocksDBForAllConfigs useStaticSubscription useTLS
    userCacheExpiredSecond userCacheMaxNum userCacheRefreshSecond
    validateSystemTopicWhenUpdateTopic waitSecondsForService waitTimeMillsInAckQueue
    waitTimeMillsInAdminBrokerQueue waitTimeMillsInHeartbeatQueue waitTimeMillsInLitePullQueue
    waitTimeMillsInPullQueue waitTimeMillsInSendQueue waitTimeMillsInTransactionQueue
    wakeCommitWhenPutMessage wakeFlushWhenPutMessage warmMapedFileEnable
    writeBufferHighWaterMark writeBufferLowWaterMark writeWithoutMmap
"""

# System properties of its Java processes, also read from tls.properties.
_TLS_NAMES: Final = """
    tls.client.authServer tls.client.certPath tls.client.keyPassword tls.client.keyPath
    tls.client.trustCertPath tls.config.file tls.enable tls.server.authClient tls.server.certPath
    tls.server.keyPassword tls.server.keyPath tls.server.mode tls.server.need.client.auth
    tls.server.trustCertPath tls.test.mode.enable
"""

ROCKETMQ_KEYS: Final = frozenset((_NAMES + _TLS_NAMES).split())

# Keys that many broker.conf files on the web still contain. Some are from releases before 4.9. The
# two releases above ignore them silently.
OBSOLETE_KEYS: Final = frozenset(
    {
        "abortFile",
        "checkTransactionMessageEnable",
        "mapedFileSizeCommitLog",
        "mapedFileSizeConsumeQueue",
        "storeCheckpoint",
        "storePathAbort",
        "storePathCheckpoint",
        "storePathConsumeQueue",
        "storePathIndex",
    }
)
